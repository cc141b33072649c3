// A store in the packed layout: WEIGHTS/model_weights.bin and .json, EXPERTS/layer_NN.bin for every layer with experts,
// expert e of a layer at byte e * (bytes of an expert).
#pragma once

#include <optional>
#include <string>

#include "format/store_directory.h"

namespace moeflux {

// `experts_dir` is the folder that holds the layer files. Without `formats`, the folder is one of the older tools. Its
// experts are affine in groups of 64: 4-bit in packed_experts, 2-bit in packed_experts_2bit. In a folder of any other
// name, the length of the first layer file tells which of the two they are.
StoreDirectory open_packed(const std::string& weights_dir, const std::string& experts_dir, const Variant& variant,
                           const std::optional<ExpertFormats>& formats);

// "layer_07.bin"
std::string layer_file_name(int64_t layer);

}  // namespace moeflux
