#pragma once

#include <vector>

#include "engine/experts/expert_call.h"
#include "engine/experts/expert_slots.h"

namespace moeflux {

// One token through a layer whose experts are all in slots for good: the device looks up what its router picked, and
// nothing is submitted or waited for.
class ResidentStep {
 public:
  // `fills`: the experts that nobody has asked for are read behind the others, so that soon all are there.
  ResidentStep(ExpertSlots& slots, int64_t layers, bool fills);

  // Every expert is looked at until it is there, and then no more.
  bool ready(int64_t layer);
  void run(const ExpertCall& call);

  // Between calls: begins some reads. Not again after one has failed, for it would fail again and again.
  void fill(StepStats& stats);
  // The slots hold nothing any more, or nobody knows what the device has of the tables.
  void forget();

 private:
  bool fill_layer(int64_t layer, StepStats& stats);

  ExpertSlots& slots_;
  bool fills_;
  struct Layer {
    int64_t found = 0;  // experts 0 ... are in slots, and those in the table
    bool is_uploaded = false;
  };
  std::vector<Layer> layers_;
  int64_t evictions_ = 0;  // that were known when the table was filled
};

}  // namespace moeflux
