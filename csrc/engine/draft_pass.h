// Guesses of the layer that drafts, before the pass that evaluates them.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>

#include "core/interruption.h"
#include "engine/turn.h"
#include "moeflux.h"

namespace moeflux {

class EngineSession;
class LoadedEngine;

// Has the layer guess what follows the tokens that these sessions are to evaluate, as many tokens as they have asked
// for. Nothing happens in a model without it. `interruption` is called while this waits and between layers. What fails
// leaves every session where it was.
void draft_with_layer(LoadedEngine& engine, std::span<EngineSession* const> sessions, const Interruption& interruption,
                      StepStats& stats);

// For no more sessions than there is room for logits. Each guess is a row of the layer, and the next one is made of it.
class DraftPass {
 public:
  // Takes the turn.
  DraftPass(LoadedEngine& engine, const Interruption& waiting);
  static int64_t max_sessions(const LoadedEngine& engine);

  void run(std::span<EngineSession* const> sessions, const Interruption& halfway, StepStats& stats);

 private:
  bool add_rows(std::span<EngineSession* const> sessions, size_t guess);
  void run_layer(StepStats& stats);
  void choose(StepStats& stats);

  LoadedEngine& engine_;
  std::unique_lock<Turn> turn_;
  int64_t rows_ = 0;
};

}  // namespace moeflux
