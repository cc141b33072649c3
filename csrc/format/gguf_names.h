// What GGUF calls the tensors of a model, and what they are called here.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "models/variant.h"

namespace moeflux {

// The canonical name; nothing for a name that no model has. Experts become model.layers.N.mlp.switch_mlp.*.
std::optional<std::string> name_of_gguf(const Variant& variant, std::string_view stored);

// The layer that a tensor blk.N.* belongs to, -1 for any other.
int64_t layer_of_gguf(std::string_view stored);

}  // namespace moeflux
