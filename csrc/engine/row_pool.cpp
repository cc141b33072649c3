#include "engine/row_pool.h"

#include <algorithm>

#include "core/arena.h"
#include "core/error.h"
#include "core/forks.h"

namespace moeflux {

RowPool::RowPool(Backend& backend, SessionMemory& memory, int64_t block_bytes)
    : backend_(backend), memory_(memory), block_bytes_(block_bytes), forks_(forks()) {}

RowPool::~RowPool() = default;

int64_t RowPool::planned_bytes(int64_t blocks, int64_t block_bytes) { return blocks * arena_bytes(block_bytes); }

View RowPool::Block::view() const { return {slab_->buffer.get(), at_ * pool_->block_bytes_}; }

bool RowPool::Block::is_shared() const {
  const std::lock_guard lock(pool_->mutex_);
  return slab_->holders[static_cast<size_t>(at_)] > 1;
}

RowPool::Block RowPool::Block::share() const {
  const std::lock_guard lock(pool_->mutex_);
  ++slab_->holders[static_cast<size_t>(at_)];
  return {pool_, slab_, at_};
}

void RowPool::check(int64_t bytes, const std::string& asker) const {
  if (backend_.max_row_buffers() == 0) memory_.check(bytes, asker);
}

void RowPool::take(int64_t count, const PlannedRows& planned, const std::string& asker, std::vector<Block>& to) {
  const std::lock_guard lock(mutex_);
  for (; count > 0; --count) {
    const auto slab = slab_with_room(count, planned, asker);
    const auto free = std::find(slab->holders.begin(), slab->holders.end(), 0);
    to.push_back({this, slab, free - slab->holders.begin()});
    *free = 1;
    ++slab->in_use;
  }
}

// Where ops take any number of buffers, each block is one, and memory is taken by the block. Elsewhere the slabs grow,
// each to three times what there is, so that a few are enough; where the limit ends that, the last has all that is
// left.
std::list<RowPool::Slab>::iterator RowPool::slab_with_room(int64_t count, const PlannedRows& planned,
                                                           const std::string& asker) {
  const int64_t buffers = backend_.max_row_buffers();
  if (buffers == 0) return add_slab(1, asker);
  const auto there = std::find_if(slabs_.begin(), slabs_.end(), [](const Slab& slab) {
    return slab.in_use < static_cast<int64_t>(slab.holders.size());
  });
  if (there != slabs_.end()) return there;
  int64_t blocks = 0;
  for (const Slab& slab : slabs_) blocks += static_cast<int64_t>(slab.holders.size());
  if (static_cast<int64_t>(slabs_.size()) == buffers)
    throw BudgetError(concat(asker, ": expected at most ", blocks * block_rows, " tokens in the sessions of this type ",
                             "together, which is what ", buffers, " buffers were made for, found all of them in use: ",
                             "close a session, or make the longest one first"),
                      count * block_bytes_);
  const int64_t bytes = planned_bytes(planned.blocks, block_bytes_);
  const int64_t left = memory_.rows_left(bytes, planned.all_bytes, blocks * block_bytes_) / arena_bytes(block_bytes_);
  const int64_t wanted = std::max((planned.blocks + buffers - 1) / buffers, 3 * blocks);
  return add_slab(std::max(count, std::min(left, wanted)), asker);
}

std::list<RowPool::Slab>::iterator RowPool::add_slab(int64_t blocks, const std::string& asker) {
  const int64_t bytes = blocks * block_bytes_;
  std::list<Slab> made(1);  // whatever fails, nothing has changed
  made.front().holders.assign(static_cast<size_t>(blocks), 0);
  made.front().bytes = arena_bytes(bytes);
  memory_.take_rows(made.front().bytes, asker);
  try {
    made.front().buffer = backend_.allocate(bytes, Memory::device, "key-value rows");
  } catch (...) {
    memory_.give_back_rows(made.front().bytes);
    throw;
  }
  slabs_.splice(slabs_.begin(), made);
  return slabs_.begin();
}

void RowPool::give_back(const Block& block) noexcept {
  if (forks() != forks_) return;
  const std::lock_guard lock(mutex_);
  int32_t& holders = block.slab_->holders[static_cast<size_t>(block.at_)];
  if (--holders > 0 || --block.slab_->in_use > 0) return;
  const int64_t bytes = block.slab_->bytes;
  slabs_.erase(block.slab_);
  memory_.give_back_rows(bytes);
}

}  // namespace moeflux
