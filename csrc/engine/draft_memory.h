// What a session keeps for the layer that drafts: its rows, and hidden states of the last call. Row i belongs to token
// first + i of the session: to that token and the hidden state of the one before it. Rows are made of every token that
// a session evaluates, so they follow from the text alone. The rows of guesses lie behind them and are written anew.
//
// None of it decides about any answer. So it is in no snapshot, and begins anew where it is not known.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "engine/layer_state.h"
#include "engine/piece.h"

namespace moeflux {

class DraftMemory {
 public:
  // `drafts`: how many a session may have at once. `beside`: what the session's other rows take at most.
  DraftMemory(const Variant& variant, const SessionOptions& options, int64_t chunk, int64_t drafts, Backend& backend,
              RowPools& pools, int64_t beside);
  // Bytes of its rows, and of the rest.
  static int64_t planned_rows(const Variant& variant, const SessionOptions& options, int64_t chunk);
  static int64_t planned_bytes(const Variant& variant, const SessionOptions& options, int64_t drafts, bool shared);

  // Positions are those of the session. As SessionState's.
  void make_room(int64_t begin, int64_t end);
  void end_call(int64_t position) noexcept;
  // For a pass that begins at a position. `first`: whether it is the first of its call.
  DraftPiece enter(int64_t begin, int64_t end, bool first) noexcept;

  // A call has failed that may have written hidden states.
  void lose() noexcept { known_ = false; }
  // The session is behind that row of the last call.
  void stand(int64_t row) noexcept { known_ = true, row_ = row; }
  // It has gone back to a position, or to one of which nothing is known.
  void go_to(int64_t position) noexcept;
  void begin_anew(int64_t position) noexcept;
  // Becomes what another was at a position. `is_there`: the other one is there now.
  void become(const DraftMemory& other, int64_t position, bool is_there);
  // Whether it can say what follows the token at a position.
  bool can_draft(int64_t position) const { return position >= first_; }

 private:
  int64_t rows_before(int64_t position) const { return std::max<int64_t>(0, position - first_); }

  int64_t width_;
  Backend& backend_;
  SessionState state_;
  std::unique_ptr<Buffer> hidden_;  // [1 + drafts, hidden]: what the head read of the last rows of the last call
  int64_t row_ = 0;                 // of the session's last token
  bool known_ = false;              // whether it is there; where it is not, it counts as zeros
  int64_t first_ = 1;               // the token that has the first row
};

}  // namespace moeflux
