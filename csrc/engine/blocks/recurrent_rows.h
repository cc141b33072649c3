// For blocks whose state is of a fixed size: recording over the rows of a piece, and what lies between two of them.
#pragma once

#include "backend/backend.h"
#include "engine/piece.h"

namespace moeflux {

// Records ops over the rows of a piece: record(first row, how many). Where the state after each row is wanted, one row
// at a time.
template <typename Record>
void over_rows(Commands& commands, const Piece& piece, const PlacedPiece& state, const Record& record) {
  if (piece.copies.empty()) return record(piece.first, piece.rows());
  for (int64_t row = 0; row < piece.rows(); ++row) {
    record(piece.first + row, 1);
    const auto place = static_cast<size_t>(row);
    if (place < piece.copies.size())
      commands.copy(state.fixed, piece.copies[place].at(state.fixed.offset, 1), state.bytes);
  }
}

}  // namespace moeflux
