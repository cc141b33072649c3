// How positions turn queries and keys.
#pragma once

#include <cstdint>
#include <optional>

#include "models/check.h"

namespace moeflux {

// How frequencies are stretched beyond the context that the model was first trained with. A mscale of 0 is absent.
struct Yarn {
  double factor = 0;
  int64_t original_context = 0;
  double beta_fast = 0;
  double beta_slow = 0;
  double mscale = 0;
  double mscale_all_dim = 0;
  bool truncate = true;  // the pairs between which frequencies are mixed are whole ones

  template <typename Self, typename Visit>
  static void each_field(Self& self, const Visit& visit) {
    visit("factor", self.factor);
    visit("original_context", self.original_context);
    visit("beta_fast", self.beta_fast);
    visit("beta_slow", self.beta_slow);
    visit("mscale", self.mscale, 0.0);
    visit("mscale_all_dim", self.mscale_all_dim, 0.0);
    visit("truncate", self.truncate, true);
  }
  bool operator==(const Yarn&) const = default;
};

struct Rope {
  int64_t dim = 0;  // channels that turn, in pairs
  double theta = 0;
  std::optional<Yarn> yarn;
  int64_t turning = 0;  // pairs: all after the first so many stand still; 0: all turn

  template <typename Self, typename Visit>
  static void each_field(Self& self, const Visit& visit) {
    visit("dim", self.dim);
    visit("theta", self.theta);
    visit("yarn", self.yarn, std::nullopt);
    visit("turning", self.turning, int64_t{0});
  }
  // `channels` is how many there are.
  void check(const Check& check, int64_t channels) const;

  bool operator==(const Rope&) const = default;
};

}  // namespace moeflux
