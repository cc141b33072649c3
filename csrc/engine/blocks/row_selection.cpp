#include "engine/blocks/row_selection.h"

#include <algorithm>
#include <bit>

#include "core/error.h"

namespace moeflux {
namespace {

// Rows that select together: so many at the end of the longest session, and more of them where there are fewer units.
constexpr int64_t least_rows = 8;
constexpr int64_t most_rows = 64;

}  // namespace

void RowSelection::place(ScratchLayout& layout, int64_t row_numbers) {
  units_ = units_seen(layout.context() - 1, index_.unit);
  if (units_ <= index_.count) return;  // no row ever selects
  layout.place(scores_, "index_scores", least_rows * units_);
  layout.place(ids_, "index_ids", most_rows * index_.count);
  blocks_.resize(static_cast<size_t>(blocks_of((index_.count + 1) * index_.unit)));
  for (size_t i = 0; i < blocks_.size(); ++i)
    layout.place(blocks_[i], concat("selected_rows ", i), block_rows * row_numbers);
}

int64_t RowSelection::attending_to_all(const Piece& piece) const {
  const int64_t first_selecting = (index_.count + 1) * index_.unit - 1;  // the position where a unit too many is seen
  return std::clamp<int64_t>(first_selecting - piece.position, 0, piece.rows());
}

int64_t RowSelection::select(Commands& commands, const Piece& piece, int64_t first, IndexScoresArgs scores) const {
  // The stride stays as it is for many steps, for devices that then launch the same again.
  const auto seen = static_cast<uint64_t>(units_seen(piece.position + piece.rows() - 1, index_.unit));
  const int64_t stride = std::min(static_cast<int64_t>(std::bit_ceil(seen)), units_);
  const int64_t count = std::min({least_rows * units_ / stride, most_rows, piece.rows() - first});
  scores.q = from_row(scores.q, first);
  if (scores.weights) scores.weights = scores.weights.at(first * scores.q.heads);
  scores.first_position = piece.position + first;
  scores.scores = scores_;
  scores.stride = stride;
  commands.index_scores(scores, count);
  commands.index_select({scores_, stride, scores.first_position, index_.unit, index_.count, ids_}, count);
  return count;
}

AttendingRows RowSelection::gather(Commands& commands, const Piece& piece, int64_t first, int64_t row,
                                   const RowPair& cached) const {
  const int64_t position = piece.position + first;
  AttendingRows attending = {first, 1, selected_rows(position, index_.unit, index_.count) - 1, cached};
  int64_t offset = 0;
  for (size_t i = 0; i < cached.size(); ++i) {
    Cache& to = attending.cached[i];
    to.blocks = blocks_;
    to.offset = offset;
    offset += to.block_bytes();
    commands.gather_rows({cached[i], ids_.at(row * index_.count), index_.unit, index_.count, position, to});
  }
  return attending;
}

}  // namespace moeflux
