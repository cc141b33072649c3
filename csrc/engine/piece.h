// What one pass through the layers computes: rows of one session, or of several. Matrices, norms, routers and experts
// see all rows together. Attention, convolution and delta-net go piece by piece, each over what its own session
// remembers.
#pragma once

#include <cstdint>
#include <span>

#include "backend/mirror.h"
#include "engine/layer_state.h"

namespace moeflux {

// What a pass does for the layer that drafts (engine/draft_memory.h).
struct DraftPiece {
  const SessionState* state = nullptr;  // of that layer alone
  int64_t row = 0;                      // of it, of the first token; -1: that token has none
  View before;  // [hidden]: the hidden state of the token before the first; empty where it is not known
  View hidden;  // [1 + drafts, hidden]: where those of the last row that is no draft go, and of the drafts
};

// The part of a session in a pass. All of it is borrowed until the pass is over.
struct Piece {
  std::span<const int32_t> tokens;  // one for each of its rows
  const SessionState* state = nullptr;
  int64_t position = 0;  // in the session, of the first row
  int64_t first = 0;     // of the pass's rows, the first one of this piece
  int64_t drafts = 0;    // how many rows, the last ones, are drafts
  Mirrored logits;       // [1 + drafts, vocab]: of the last row that is none, and of these; or nobody wants them
  Mirrored found;        // ShortlistHead [1 + drafts]: a survey of each, which the host gets in their place; or empty
  Mirrored lists;        // behind these: a shortlist of each, as ShortlistLayout has it; or empty
  double factor = 0;     // by which they weigh
  std::span<float> all_logits;  // [rows, vocab]: where those of every row go; empty likewise

  std::span<const float> hidden_in;  // [rows, width]: what the rows begin with, where the stage has no embedding
  std::span<float> hidden_out;       // [rows, width]: where they go, where it has not the last layer

  std::span<const View> copies;  // where the recurrent state after each row but the last goes; none if nobody wants it

  DraftPiece draft;  // where the model has such a layer

  std::span<const int32_t> past;   // all tokens before the call that this is a part of, as far as they are known
  std::span<const int32_t> given;  // and all of the call, with those that are known to come next

  // At any position up to the end of `given`.
  int32_t token(int64_t at) const {
    const auto index = static_cast<size_t>(at);
    return index < past.size() ? past[index] : given[index - past.size()];
  }
  int64_t rows() const { return static_cast<int64_t>(tokens.size()); }
};

// The rows of a pass. Pieces follow each other, each of another session.
struct Rows {
  std::span<const Piece> pieces;
  int64_t n = 0;  // of all pieces
};

}  // namespace moeflux
