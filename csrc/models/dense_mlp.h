// One feed-forward part for all tokens.
#pragma once

#include "models/check.h"
#include "models/tensor_list.h"

namespace moeflux {

struct DenseMlp {
  int64_t intermediate = 0;

  static constexpr std::string_view kind = "dense_mlp";
  template <typename Self, typename Visit>
  static void each_field(Self& self, const Visit& visit) {
    visit("intermediate", self.intermediate);
  }
  void check(const Check& check) const { check.limits({{"intermediate", intermediate, 1, max_width}}); }

  void add_tensors(TensorList& list) const { list.gated_mlp("mlp.", intermediate); }

  bool operator==(const DenseMlp&) const = default;
};

}  // namespace moeflux
