#include "engine/checkpoints.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace moeflux {

void Checkpoints::add_rooms(int64_t count) {
  std::vector<std::unique_ptr<Buffer>> rooms;
  for (int64_t i = 0; i < count; ++i) rooms.push_back(backend_.allocate(bytes_, Memory::device, "checkpoints"));
  const size_t all = checkpoints_.size() + rooms_.size() + rooms.size();
  rooms_.reserve(all);  // because the rooms of dropped checkpoints come back
  checkpoints_.reserve(all + 1);
  rooms_.insert(rooms_.end(), std::move_iterator(rooms.begin()), std::move_iterator(rooms.end()));
}

void Checkpoints::drop_rooms(int64_t count) { rooms_.resize(rooms_.size() - static_cast<size_t>(count)); }

std::vector<int64_t> Checkpoints::positions() const {
  std::vector<int64_t> positions;
  for (const Checkpoint& checkpoint : checkpoints_) positions.push_back(checkpoint.position);
  return positions;
}

bool Checkpoints::has_any(int64_t first, int64_t last) const {
  return std::ranges::any_of(checkpoints_,
                             [&](const Checkpoint& c) { return first <= c.position && c.position <= last; });
}

int64_t Checkpoints::newest(int64_t most) const {
  int64_t newest = 0;
  for (const Checkpoint& checkpoint : checkpoints_)
    if (checkpoint.position <= most) newest = checkpoint.position;
  return newest;
}

std::vector<Checkpoints::Checkpoint>::iterator Checkpoints::not_before(int64_t position) {
  return std::lower_bound(checkpoints_.begin(), checkpoints_.end(), position,
                          [](const Checkpoint& c, int64_t p) { return c.position < p; });
}

const Buffer* Checkpoints::at(int64_t position) const {
  for (const Checkpoint& checkpoint : checkpoints_)
    if (checkpoint.position == position) return checkpoint.recurrent.get();
  return nullptr;
}

bool Checkpoints::use(int64_t position) {
  const auto found = not_before(position);
  if (found == checkpoints_.end() || found->position != position) return false;
  found->used = ++clock_;
  return true;
}

void Checkpoints::add(int64_t position) {
  std::unique_ptr<Buffer> room;
  if (position > 0) {
    room = std::move(rooms_.back());
    rooms_.pop_back();
  }
  checkpoints_.insert(not_before(position), {position, ++clock_, std::move(room)});
}

void Checkpoints::keep(int64_t most, int64_t newest) {
  while (static_cast<int64_t>(checkpoints_.size()) > most) {
    auto victim = checkpoints_.end();
    for (auto it = checkpoints_.begin(); it != checkpoints_.end(); ++it) {
      if (it->position == 0 || it->position == newest) continue;
      if (victim == checkpoints_.end() || it->used < victim->used) victim = it;
    }
    if (victim == checkpoints_.end()) return;
    rooms_.push_back(std::move(victim->recurrent));
    checkpoints_.erase(victim);
  }
}

void Checkpoints::forget_after(int64_t position) {
  while (!checkpoints_.empty() && checkpoints_.back().position > position) {
    if (checkpoints_.back().recurrent) rooms_.push_back(std::move(checkpoints_.back().recurrent));
    checkpoints_.pop_back();
  }
}

}  // namespace moeflux
