// Attention to the rows that an index selects, for mixers of any kind that have one.
//
// A row that sees no more units than it may select attends to all rows, in one go with the others like it. Each other
// row selects for itself: the index is asked for some rows at a time, and what one selected is gathered side by side,
// so that attention goes over it as over any rows. What a row yields depends on what it selected and on nothing else.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "engine/blocks/block.h"
#include "models/index.h"

namespace moeflux {

// What attention keeps of each position: keys and values, or latents and rotated keys.
using RowPair = std::array<Cache, 2>;

// Rows of a piece that attend in one go.
struct AttendingRows {
  int64_t first = 0;  // of the piece
  int64_t count = 0;
  int64_t position = 0;  // of the first, among the cached rows
  RowPair cached;
};

class RowSelection {
 public:
  explicit RowSelection(const Index& index) : index_(index) {}

  // `row_numbers`: in both rows that attention keeps of a position.
  void place(ScratchLayout& layout, int64_t row_numbers);
  // Whether any row of the piece selects. If none does, nobody needs queries of the index.
  bool selects(const Piece& piece) const { return attending_to_all(piece) < piece.rows(); }
  // Calls attend(AttendingRows) until all rows of the piece have attended. `scores`: of the piece's first row, but for
  // the scores themselves. The keys of the index are there for all rows.
  template <typename Attend>
  void record(Commands& commands, const Piece& piece, const IndexScoresArgs& scores, const RowPair& cached,
              const Attend& attend) const {
    int64_t first = attending_to_all(piece);
    if (first > 0) attend(AttendingRows{0, first, piece.position, cached});
    while (first < piece.rows()) {
      const int64_t count = select(commands, piece, first, scores);
      for (int64_t i = 0; i < count; ++i) attend(gather(commands, piece, first + i, i, cached));
      first += count;
    }
  }

 private:
  // How many rows of the piece do, which are its first.
  int64_t attending_to_all(const Piece& piece) const;
  // Selects for some rows of the piece from `first` on. Returns how many.
  int64_t select(Commands& commands, const Piece& piece, int64_t first, IndexScoresArgs scores) const;
  // What row `first` of the piece selected, which was number `row` of those that did so together.
  AttendingRows gather(Commands& commands, const Piece& piece, int64_t first, int64_t row, const RowPair& cached) const;

  Index index_;
  int64_t units_ = 0;         // of the longest session
  View scores_;               // room for those of some rows
  View ids_;                  // i32 [rows, index.count]
  std::vector<View> blocks_;  // [block_rows, row_numbers] each: what a row selected
};

}  // namespace moeflux
