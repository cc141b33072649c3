#pragma once

#include <vector>

#include "engine/experts/expert_call.h"
#include "engine/experts/expert_slots.h"

namespace moeflux {

// Tokens through a layer whose experts are all in slots for good: one, or several where the backend groups their pairs.
// The device looks up the experts that its router picked, and the host waits for nothing. Of one token it submits
// nothing, either. Of several it submits a few layers at a time, so that the device computes while the host records,
// and of many each layer, because whoever gives the call up waits for what was submitted.
class ResidentStep {
 public:
  // `fills`: experts that nobody has asked for are read after the others, so that soon all are there.
  ResidentStep(ExpertSlots& slots, int64_t layers, bool fills);

  // Whether all experts of the layer are there. It looks at each expert until that one is there, and then no more.
  bool ready(int64_t layer);
  void run(const ExpertCall& call);
  // Whether all experts of all layers are there, and the device knows where.
  bool serves_all();

  // Begins some reads, between calls. After one has failed it begins none, because that one would fail again and again.
  void fill();
  // To be called when the slots hold nothing any more, or when nobody knows which tables the device has.
  void forget();

 private:
  bool fill_layer(int64_t layer);

  ExpertSlots& slots_;
  bool fills_;
  struct Layer {
    int64_t found = 0;  // the experts before this one are in slots and in the table
    bool is_uploaded = false;
  };
  std::vector<Layer> layers_;
  int64_t evictions_ = 0;  // how many there had been when the table was filled
};

}  // namespace moeflux
