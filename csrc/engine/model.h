// What every step of an engine reads and none changes.
#pragma once

#include <vector>

#include "engine/blocks/make_blocks.h"
#include "engine/weights.h"
#include "models/variant.h"

namespace moeflux {

struct Model {
  Variant variant;
  Matrix embed;  // [vocab, hidden]
  Matrix head;   // [vocab, hidden]; the embedding itself when tied
  View norm;     // [hidden]
  std::vector<LayerBlocks> layers;
  DenseWeights weights;  // the memory of all these

  float eps() const { return static_cast<float>(variant.rms_norm_eps); }
};

// `progress` is told after each piece; when it says to stop: StateError.
Model load_model(const StoreDirectory& store, Backend& backend, const Progress& progress = {});

}  // namespace moeflux
