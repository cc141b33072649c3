// What every step of an engine reads and none changes.
#pragma once

#include <cstdint>
#include <vector>

#include "core/variant.h"
#include "engine/weights.h"

namespace moeflux {

struct Model {
  Variant variant;
  ModelWeights weights;
  std::vector<double> frequencies;  // rope, radians a position
  double rope_magnitude = 1;
  float softmax_scale = 1;

  float eps() const { return static_cast<float>(variant.rms_norm_eps); }
};

}  // namespace moeflux
