// How positions turn queries and keys.
#pragma once

#include <cstdint>
#include <optional>

namespace moeflux {

// How frequencies are stretched beyond the context that the model was first trained with. A mscale of 0 is absent.
struct Yarn {
  double factor = 0;
  int64_t original_context = 0;
  double beta_fast = 0;
  double beta_slow = 0;
  double mscale = 0;
  double mscale_all_dim = 0;

  bool operator==(const Yarn&) const = default;
};

struct Rope {
  int64_t dim = 0;  // channels that turn, in pairs
  double theta = 0;
  std::optional<Yarn> yarn;

  bool operator==(const Rope&) const = default;
};

}  // namespace moeflux
