// Where a session's rows of one kind lie: a table of blocks. Layers that see everything need every row. Layers with a
// window need those that the next row sees, and those before other places that the session may go back to.
//
// A block whose rows nobody needs any more is given back. During a call it waits for later rows instead, so that a call
// that has begun never asks for memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "engine/row_pool.h"

namespace moeflux {

// That so many positions take.
constexpr int64_t blocks_of(int64_t positions) { return (positions + block_rows - 1) / block_rows; }

// So many rows before those that a session needs stay as well, so that it can always go back a little.
constexpr int64_t spare_rows = 64;

// Whether the session may go back to a place first ... last.
using Places = std::function<bool(int64_t first, int64_t last)>;

// Rows of layers that see equally far.
struct RowKind {
  int64_t window = 0;       // rows that a row sees at most, its own among them; 0: all
  int64_t block_bytes = 0;  // of the rows of block_rows positions, in all of these layers

  // The first row that a session at a position needs, and the first that it keeps.
  int64_t first_needed(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0; }
  int64_t first_kept(int64_t position) const {
    return window > 0 ? std::max<int64_t>(0, position + 1 - window - spare_rows) : 0;
  }
  // The most blocks that the rows of a chunk have together with those that they see and spare ones.
  int64_t most_in_chunk(int64_t chunk) const;
  // The most that a session has.
  int64_t planned_blocks(int64_t max_context, int64_t chunk, int64_t max_checkpoints) const;
};

class RowTable {
 public:
  // Blocks are taken from the pool, which is for this kind. A pass through the layers has `chunk` rows at most.
  RowTable(const RowKind& kind, RowPool& pool, int64_t max_context, int64_t chunk);

  const RowKind& kind() const { return kind_; }
  std::span<const View> views() const { return views_; }  // empty where no row is needed
  int64_t changes() const { return changes_; }            // how often one of these became another
  // Whether a row that comes next may be written where it belongs.
  bool has_room(int64_t row) const { return row / block_rows < std::ssize(blocks_) && is_own(row / block_rows); }

  // ---- A call --------------------------------------------------------------------------------------------------

  // How many blocks the rows begin ... end - 1 of a call need besides those that wait already.
  int64_t lacking(int64_t begin, int64_t end) const;
  // Blocks that wait. BudgetError as RowPool::take.
  void take(int64_t count, const PlannedRows& planned, const char* asker);
  // Gives back what the last `take` has brought.
  void undo_take() noexcept;
  // Copies the block that these rows begin in, if other sessions have it too.
  void own(Backend& backend, int64_t begin, int64_t end);
  // Before a pass that writes these rows.
  void enter(int64_t begin, int64_t end, const Places& places) noexcept;
  // At a position: gives back blocks that nobody needs; at the end of a call, also those that wait.
  void forget(int64_t position, const Places& places) noexcept;
  void end_call(int64_t position, const Places& places) noexcept;

  // ---- Other timelines -----------------------------------------------------------------------------------------

  // Becomes what another one was at a position, from nothing. Full blocks are shared. The one that is not full is
  // copied, into one that waits.
  void become(Backend& backend, const RowTable& other, int64_t position);
  bool has_part(int64_t position) const { return position % block_rows > 0 && at(position / block_rows); }
  // How many blocks `renew` needs besides those that wait already.
  int64_t lacking_anew(int64_t position) const;
  // Has blocks for what a session at a position needs, whatever there was. The caller fills them.
  void renew(int64_t position) noexcept;

  // From there on, every place up to `position` has the rows that it needs.
  int64_t exact_from(int64_t position) const;

 private:
  RowPool::Block& at(int64_t index) { return blocks_[static_cast<size_t>(index)]; }
  const RowPool::Block& at(int64_t index) const { return blocks_[static_cast<size_t>(index)]; }
  // Whether there is one that may be written.
  bool is_own(int64_t index) const { return at(index) && !at(index).is_shared(); }
  void put(int64_t index, RowPool::Block block) noexcept;
  void put_waiting(int64_t index) noexcept;
  // Does without it. One that was the session's own waits.
  void leave(int64_t index) noexcept;
  void leave_before(int64_t row, const Places& places) noexcept;

  RowKind kind_;
  RowPool& pool_;
  int64_t most_new_;                     // blocks that a call writes and needs at once, however long it is
  std::vector<View> views_;              // [blocks of max_context]: those of `blocks_`, which layers and ops see
  std::vector<RowPool::Block> blocks_;   // likewise; empty where no row is needed
  std::vector<RowPool::Block> waiting_;  // for rows to come
  size_t waited_ = 0;                    // how many did before the last `take`
  int64_t first_ = 0;                    // blocks are empty before this one
  int64_t end_ = 0;                      // and from this one on
  int64_t changes_ = 0;
  int64_t known_from_ = 0;  // rows before this one are not known, even in a block that is there
};

}  // namespace moeflux
