// The tensors a variant is made of, routed experts aside, and the names files give them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "models/tensor_list.h"
#include "models/variant.h"

namespace moeflux {

// `has` tells whether the store holds a tensor of that name: latent attention keeps its second key-value projection
// either as one matrix or as two stacks, layer by layer.
std::vector<TensorRequirement> tensor_requirements(const Variant& variant, const TensorList::Has& has);

// The name without the `language_model.` that multimodal checkpoints put first or after `model.`, and with the words
// that most models have for their feed-forward parts: `mlp`, where some say `block_sparse_moe`.
std::string canonical_name(std::string_view stored);

// Whether the canonical name is of a part that is deliberately not used: vision tower, multi-token prediction, tables
// of rope frequencies, an output matrix beside tied embeddings.
bool is_unused_tensor(const Variant& variant, std::string_view canonical);

// "model.layers.3."
std::string layer_prefix(int64_t layer);
// The number in such a name; -1 for any other.
int64_t layer_of(std::string_view name);

}  // namespace moeflux
