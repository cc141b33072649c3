// Residual streams side by side. Each half of a layer reads a gated mean of them, and what it yields goes to each of
// them by a gate of its own.
#pragma once

#include <string>

#include "models/check.h"
#include "models/tensor_list.h"

namespace moeflux {

struct ResidualStreams {
  int64_t count = 0;
  int64_t rank = 0;  // through which the gates of the mean are made

  template <typename Self, typename Visit>
  static void each_field(Self& self, const Visit& visit) {
    visit("count", self.count);
    visit("rank", self.rank);
  }
  void check(const Check& check) const {
    check.limits({{"streams.count", count, 2, 64}, {"streams.rank", rank, 1, max_width}});
  }
  // `name` is that of one connection, of a half of a layer or behind the last one, which yields nothing to the streams.
  void add_tensors(TensorList& list, const std::string& name, bool yields) const {
    list.vector(name + ".hc_norm.weight", count * list.hidden());
    list.matrix(name + ".input_mix_weight_down", rank, count * list.hidden());
    list.matrix(name + ".input_mix_weight_up", count * list.hidden(), rank);
    if (yields) list.matrix(name + ".block_inject_weight", count, count * list.hidden());
  }

  bool operator==(const ResidualStreams&) const = default;
};

}  // namespace moeflux
