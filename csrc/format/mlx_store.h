// A folder of MLX safetensors used in place: config.json, and model.safetensors.index.json with its shards, or one
// file. Routed experts are slices of the stacked tensors model.layers.N.mlp.switch_mlp.{gate,up,down}_proj. A
// checkpoint in plain elements as Hugging Face publishes it is taken too.
#pragma once

#include <string>

#include "format/store_directory.h"

namespace moeflux {

StoreDirectory open_mlx(const std::string& folder, const Variant& variant);

}  // namespace moeflux
