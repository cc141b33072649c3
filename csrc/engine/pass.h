// One pass of rows through all layers, with the engine's turn.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>

#include "core/interruption.h"
#include "engine/piece.h"
#include "engine/turn.h"
#include "moeflux.h"

namespace moeflux {

class LoadedEngine;

class Pass {
 public:
  // Takes the turn. `waiting` is called while it waits for it: nothing has changed then.
  Pass(LoadedEngine& engine, const Interruption& waiting);

  // A piece with one row or more, checked. All together have at most chunk() rows, each of another session.
  void add(const Piece& piece);
  int64_t rows() const { return rows_; }

  // Evaluates what was added. `halfway` is called between layers and between reads. After an error no batch is left in
  // flight. A pass that was given up has not touched the pieces' `logits`.
  void run(const Interruption& halfway, StepStats& stats);

 private:
  void begin_stream(const Rows& rows);
  void write_tokens();
  void run_layers(StepStats& stats);
  void run_logits(StepStats& stats);
  void hand_on();
  void run_draft_rows();
  void record_every_last();
  void await(StepStats& stats);
  bool may_record_next();
  void record_next() noexcept;
  void run_recorded(StepStats& stats);
  void record_last_logits(std::span<const Piece> pieces, int64_t count);
  View side_by_side(std::span<const Piece> pieces);
  void every_logit(const Piece& piece, StepStats& stats);
  void send_ahead();
  void bring_logits(std::span<const Piece> pieces);
  void record_logits(View rows, int64_t count, View out);

  LoadedEngine& engine_;
  std::unique_lock<Turn> turn_;
  int64_t rows_ = 0;
};

}  // namespace moeflux
