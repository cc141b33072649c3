// The tensors a variant is made of, routed experts aside, and the names files give them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/variant.h"

namespace moeflux {

enum class TensorKind {
  vector,  // one float tensor of exactly this name and shape
  matrix,  // NAME.weight, with NAME.scales and NAME.biases when quantised along the last axis
  stack,   // the same with a leading axis: one matrix a head
  conv,    // one float tensor [channels, taps, 1]
};

// Whether it is one tensor, and no part of a matrix.
constexpr bool is_vector(TensorKind kind) { return kind == TensorKind::vector || kind == TensorKind::conv; }

struct TensorRequirement {
  std::string name;  // a base name for matrix and stack, else the whole name
  TensorKind kind;
  std::vector<int64_t> shape;  // logical: columns, not packed words
};

// `has` tells whether the store holds a tensor of that name: latent attention keeps its second key-value projection
// either as one matrix or as two stacks, layer by layer.
std::vector<TensorRequirement> tensor_requirements(const Variant& variant,
                                                   const std::function<bool(const std::string&)>& has);

// The name without the `language_model.` that multimodal checkpoints put first or after `model.`.
std::string canonical_name(std::string_view stored);

// Whether the canonical name is of a part that is deliberately not used: vision tower, multi-token prediction, tables
// of rope frequencies, an output matrix beside tied embeddings.
bool is_unused_tensor(const Variant& variant, std::string_view canonical);

// "model.layers.3."
std::string layer_prefix(int64_t layer);

}  // namespace moeflux
