// An index whose keys are each of a unit of rows: the mean of what the rows yield, normed and turned as its first row
// is.
#pragma once

#include "engine/blocks/recurrent_rows.h"
#include "engine/blocks/row_selection.h"
#include "models/rope.h"

namespace moeflux {

class UnitIndex {
 public:
  UnitIndex(const Index& shape, const Rope& rope, float eps)
      : shape_(shape), rope_(rope), eps_(eps), selection_(shape) {}

  // `row_numbers`: in both rows that attention keeps of a position.
  void place(ScratchLayout& layout, int64_t row_numbers);
  void load(const LayerTensors& tensors);
  // Queries of all rows, and what their keys are made of.
  void record(Commands& commands, const Scratch& scratch, const Rows& rows) const;
  // Keeps the keys of the units that a piece completes, and calls attend(AttendingRows) until all its rows have
  // attended. The layer's third piece of state are keys, the fourth what the rows behind the last unit yield.
  template <typename Attend>
  void select(Commands& commands, const Piece& piece, const LayerState& state, const RowPair& cached,
              const Attend& attend) const {
    keep_keys(commands, piece, state);
    IndexScoresArgs scores;
    scores.q = from_row(queries(shape_.dim), piece.first);
    scores.scale = scale();
    scores.keys = state[2].rows;
    selection_.record(commands, piece, scores, cached, attend);
  }

 private:
  struct Room {
    View angles;       // of the rows
    View unit_angles;  // of the first rows of units that are complete now
    View queries;      // [n, heads, dim]
    View yields;       // [n, dim]
    View gathered;     // [n + unit - 1, dim]: those of a piece, behind those that waited
    View means;        // [n, dim]
    Mirrored shares;   // [n + unit - 1], each a unit's part
  };

  float scale() const;
  // The first `dim` numbers of each head.
  Heads queries(int64_t dim) const { return {room_.queries, shape_.heads, dim, shape_.heads * shape_.dim, shape_.dim}; }
  void keep_keys(Commands& commands, const Piece& piece, const LayerState& state) const;
  void keep_rows(Commands& commands, const Piece& piece, const LayerState& state, int64_t first, int64_t n) const;

  Index shape_;
  Rope rope_;
  float eps_;
  RowSelection selection_;
  Matrix q_;     // [heads * dim, hidden]
  Matrix k_;     // [dim, hidden]
  View q_norm_;  // [dim]
  View k_norm_;  // [dim]
  Room room_;
};

}  // namespace moeflux
