// A layer's experts in one call of the engine: the arguments of every way to compute them.
#pragma once

#include "core/stopwatch.h"
#include "engine/blocks/routed_experts.h"
#include "engine/recorder.h"

namespace moeflux {

struct ExpertCall {
  Recorder& recorder;
  const RoutedExpertsBlock& block;
  const Scratch& scratch;
  int64_t n;           // rows
  int64_t guess_rows;  // for how many of them the choice in the next layer is guessed
  StepStats& stats;
  Stopwatch& laps;  // of the whole call: what took how long

  Commands& commands() const { return recorder.current(); }
  int64_t layer() const { return block.layer(); }
};

}  // namespace moeflux
