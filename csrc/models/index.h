// An index over the rows that attention keeps: it selects those that a row attends to.
#pragma once

#include "models/check.h"

namespace moeflux {

// Rows that lie together in a session's memory: no unit is in two blocks of them.
constexpr int64_t max_unit = 256;

struct Index {
  int64_t heads = 0;
  int64_t dim = 0;           // of its keys
  int64_t count = 0;         // how many units a row selects
  int64_t unit = 1;          // rows that share a key and are selected together
  bool interleaved = false;  // channels that turn together are neighbours; of latent attention alone

  template <typename Self, typename Visit>
  static void each_field(Self& self, const Visit& visit) {
    visit("heads", self.heads);
    visit("dim", self.dim);
    visit("count", self.count);
    visit("unit", self.unit, 1);
    visit("interleaved", self.interleaved, false);
  }
  // `turning`: channels of a key that turn.
  void check(const Check& check, int64_t turning) const {
    check.limits({{"index.heads", heads, 1, max_width},
                  {"index.dim", dim, turning, max_width},
                  {"index.heads * index.dim", heads * dim, 1, max_product_width},
                  {"index.count", count, 1, max_context_limit},
                  {"index.unit", unit, 1, max_unit}});
    check.require(max_unit % unit == 0, "index.unit", concat("a divisor of ", max_unit), unit);
  }

  bool operator==(const Index&) const = default;
};

}  // namespace moeflux
