#include "engine/row_table.h"

#include <utility>

namespace moeflux {
namespace {

// That so many neighbours touch at most, wherever they begin.
int64_t most_touched(int64_t rows) { return blocks_of(rows - 1) + 1; }

}  // namespace

int64_t RowKind::most_in_chunk(int64_t chunk) const { return most_touched(spare_rows + window - 1 + chunk); }

// Rows of a session, of the chunk under way, of the place where the call began, and of checkpoints.
int64_t RowKind::planned_blocks(int64_t max_context, int64_t chunk, int64_t max_checkpoints) const {
  const int64_t all = blocks_of(max_context);
  if (window == 0) return all;
  const int64_t places = (max_checkpoints + 1) * most_touched(std::max<int64_t>(1, window - 1));
  return std::min(all, most_in_chunk(chunk) + places);
}

RowTable::RowTable(const RowKind& kind, RowPool& pool, int64_t max_context, int64_t chunk)
    : kind_(kind),
      pool_(pool),
      most_new_(kind.window > 0 ? kind.most_in_chunk(chunk) : blocks_of(max_context)),
      views_(static_cast<size_t>(blocks_of(max_context))),
      blocks_(views_.size()) {
  waiting_.reserve(blocks_.size());
}

void RowTable::put(int64_t index, RowPool::Block block) noexcept {
  ++changes_;
  views_[static_cast<size_t>(index)] = block.view();
  at(index) = std::move(block);
  first_ = std::min(first_, index);
  end_ = std::max(end_, index + 1);
}

void RowTable::put_waiting(int64_t index) noexcept {
  put(index, std::move(waiting_.back()));
  waiting_.pop_back();
}

void RowTable::leave(int64_t index) noexcept {
  changes_ += bool(at(index));
  if (is_own(index)) waiting_.push_back(std::move(at(index)));  // there is room for all
  at(index) = {};
  views_[static_cast<size_t>(index)] = {};
}

// A place needs the rows of a block if it lies behind the first of them, and sees the last.
void RowTable::leave_before(int64_t row, const Places& places) noexcept {
  for (int64_t i = first_; i < row / block_rows; ++i) {
    const int64_t begin = i * block_rows, end = begin + block_rows;
    if (at(i) && !places(begin + 1, end + kind_.window - 2)) leave(i);
    if (i == first_ && !at(i)) ++first_;
  }
}

// ---- A call --------------------------------------------------------------------------------------------------------

int64_t RowTable::lacking(int64_t begin, int64_t end) const {
  if (begin == end) return 0;
  const int64_t first = begin / block_rows;
  int64_t more = 0;
  for (int64_t i = first; i < blocks_of(end); ++i) more += !at(i);
  const int64_t copies = at(first) && at(first).is_shared();
  return std::max<int64_t>(0, copies + std::min(more, most_new_) - std::ssize(waiting_));
}

void RowTable::take(int64_t count, const PlannedRows& planned, const char* asker) {
  waited_ = waiting_.size();
  if (count > 0) pool_.take(count, planned, asker, waiting_);
}

void RowTable::undo_take() noexcept {
  while (waiting_.size() > waited_) waiting_.pop_back();
}

void RowTable::own(Backend& backend, int64_t begin, int64_t end) {
  const int64_t first = begin / block_rows;
  if (begin == end || !at(first) || !at(first).is_shared()) return;
  if (begin % block_rows > 0) backend.copy(at(first).view(), waiting_.back().view(), kind_.block_bytes).wait();
  put_waiting(first);
}

void RowTable::enter(int64_t begin, int64_t end, const Places& places) noexcept {
  leave_before(kind_.first_kept(begin), places);
  for (int64_t i = begin / block_rows; i < blocks_of(end); ++i)
    if (!at(i)) put_waiting(i);
}

void RowTable::forget(int64_t position, const Places& places) noexcept {
  const size_t waited = waiting_.size();
  leave_before(kind_.first_kept(position), places);
  while (waiting_.size() > waited) waiting_.pop_back();
}

void RowTable::end_call(int64_t position, const Places& places) noexcept {
  for (; end_ > blocks_of(position); --end_) leave(end_ - 1);
  first_ = std::min(first_, end_);
  forget(position, places);
  waiting_.clear();
  if (position == 0) known_from_ = 0;
}

// ---- Other timelines -----------------------------------------------------------------------------------------------

void RowTable::become(Backend& backend, const RowTable& other, int64_t position) {
  known_from_ = other.known_from_;
  const int64_t full = position / block_rows;
  first_ = kind_.first_kept(position) / block_rows;
  for (int64_t i = first_; i < full; ++i)
    if (other.at(i)) put(i, other.at(i).share());
  if (!other.has_part(position)) return;
  backend.copy(other.at(full).view(), waiting_.back().view(), kind_.block_bytes).wait();
  put_waiting(full);
}

int64_t RowTable::lacking_anew(int64_t position) const {
  int64_t count = 0;
  for (int64_t i = kind_.first_needed(position) / block_rows; i < blocks_of(position); ++i) count += !is_own(i);
  return std::max<int64_t>(0, count - std::ssize(waiting_));
}

void RowTable::renew(int64_t position) noexcept {
  known_from_ = kind_.first_needed(position);
  const int64_t first = known_from_ / block_rows;
  for (int64_t i = first_; i < std::min(first, end_); ++i) leave(i);
  for (int64_t i = first; i < blocks_of(position); ++i)
    if (!is_own(i)) put_waiting(i);
}

int64_t RowTable::exact_from(int64_t position) const {
  int64_t first = blocks_of(position);
  while (first > 0 && at(first - 1)) --first;
  const int64_t row = std::max(first * block_rows, known_from_);
  return row == 0 ? 0 : std::min(position, row + kind_.window - 1);
}

}  // namespace moeflux
