#pragma once

#include <vector>

#include "engine/experts/expert_call.h"
#include "engine/experts/expert_slots.h"

namespace moeflux {

// One token through a layer whose experts are all in slots for good. The device looks up the experts that its router
// picked, and the host submits nothing and waits for nothing.
class ResidentStep {
 public:
  // `fills`: experts that nobody has asked for are read after the others, so that soon all are there.
  ResidentStep(ExpertSlots& slots, int64_t layers, bool fills);

  // Whether all experts of the layer are there. It looks at each expert until that one is there, and then no more.
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
