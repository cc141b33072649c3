#include "engine/drafts.h"

#include <algorithm>
#include <utility>

#include "core/arena.h"

namespace moeflux {
namespace {

// Tokens that must stand before a place as they do at the end. One alone is often an accident.
constexpr int64_t least_in_common = 2;
constexpr int64_t most_in_common = 8;

// How many tokens up to and including `place` stand as they do at the end, where `place` has the last one.
int64_t in_common(std::span<const int32_t> before, int64_t place) {
  const auto end = static_cast<int64_t>(before.size());  // where the last token will be
  int64_t count = 1;
  while (count < most_in_common && count <= place &&
         before[static_cast<size_t>(place - count)] == before[static_cast<size_t>(end - count)])
    ++count;
  return count;
}

}  // namespace

Drafts::Drafts(Backend& backend, const DraftSource& source, int64_t most, int64_t recurrent_bytes)
    : source_(source), rows_(static_cast<size_t>(1 + most)), guesses_(rows_.size()), longest_(most) {
  if (recurrent_bytes == 0) return;
  for (int64_t i = 0; i < most; ++i)
    copies_.push_back(backend.allocate(recurrent_bytes, Memory::device, "state between drafts"));
  views_.resize(copies_.size());
}

int64_t Drafts::planned_bytes(int64_t most, int64_t recurrent_bytes) { return most * arena_bytes(recurrent_bytes); }

// Returns how many there may be.
int64_t Drafts::begin(int32_t token, int64_t most) {
  rows_.front() = guesses_.front() = token;
  return std::min(most, static_cast<int64_t>(rows_.size()) - 1);
}

int64_t Drafts::expect(int32_t token, int64_t most) { return proposed_ = std::max<int64_t>(0, begin(token, most)); }

void Drafts::believe() { std::ranges::copy(guesses(), rows_.begin()); }

int64_t Drafts::propose(std::span<const int32_t> before, int32_t token, int64_t most) {
  const int64_t room = begin(token, most);
  proposed_ = room > 0 ? source_(before, token, std::span(rows_).subspan(1, static_cast<size_t>(room))) : 0;
  return proposed_;
}

std::span<const View> Drafts::copies() {
  const size_t count = std::min(copies_.size(), static_cast<size_t>(proposed_));
  for (size_t i = 0; i < count; ++i) views_[i] = {copies_[i].get(), 0};
  return std::span(views_).first(count);
}

void Drafts::keep() {
  kept_ = std::exchange(proposed_, 0);
  taken_ = 0;
}

std::unique_ptr<Buffer>* Drafts::forget() {
  auto* const copy = ahead() > 0 && !copies_.empty() ? &copies_[static_cast<size_t>(taken_)] : nullptr;
  if (kept_ > 0) longest_ = taken_ + 1;
  proposed_ = kept_ = taken_ = 0;
  return copy;
}

int64_t look_up(std::span<const int32_t> before, int32_t token, std::span<int32_t> drafts) {
  const auto count = static_cast<int64_t>(before.size());
  int64_t best = least_in_common - 1;
  int64_t follows = 0;  // where the drafts begin
  for (int64_t place = count - 1; place > 0 && best < most_in_common; --place) {
    if (before[static_cast<size_t>(place)] != token) continue;
    const int64_t common = in_common(before, place);
    if (common <= best) continue;
    best = common;
    follows = place + 1;
  }
  if (follows == 0) return 0;
  // Where the text ends, the drafts go on with the token and with themselves.
  const auto at = [&](int64_t place) {
    if (place < count) return before[static_cast<size_t>(place)];
    return place == count ? token : drafts[static_cast<size_t>(place - count - 1)];
  };
  for (size_t i = 0; i < drafts.size(); ++i) drafts[i] = at(follows + static_cast<int64_t>(i));
  return static_cast<int64_t>(drafts.size());
}

}  // namespace moeflux
