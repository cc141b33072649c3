// One feed-forward part for all tokens.
#pragma once

#include "models/tensor_list.h"

namespace moeflux {

struct DenseMlp {
  int64_t intermediate = 0;

  void add_tensors(TensorList& list) const { list.gated_mlp("mlp.", intermediate); }

  bool operator==(const DenseMlp&) const = default;
};

}  // namespace moeflux
