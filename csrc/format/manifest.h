// model_weights.json, the directory of a packed store's model_weights.bin.
//
//   {"model": "...", "num_tensors": n, "config": {...},
//    "tensors": {"name": {"offset": 0, "size": 8, "shape": [2, 2], "dtype": "BF16"},
//                "name": {"offset": 64, "size": 8, "shape": [2, 1], "dtype": "U32", "bits": 4},
//                "name": {"offset": 128, "size": 288, "shape": [2, 144], "dtype": "U8", "block": "Q4_K"}, ...}}
//
// Only `tensors` matters here; other members, of the file and of an entry, are ignored. Checked: every tensor starts at
// a multiple of packed_alignment, lies within the .bin file, has the length that its shape and dtype say, and shares no
// byte with another.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/block_types.h"
#include "format/tensor_entry.h"

namespace moeflux {

constexpr int64_t packed_alignment = 64;

struct ManifestEntry {
  TensorEntry tensor;
  int bits = 0;                       // of the codes in a U32 tensor, 4 when not given; 0 for every other dtype
  BlockType block = BlockType::none;  // of the blocks in a U8 tensor
};

struct Manifest {
  std::vector<ManifestEntry> tensors;  // in the order of the file
};

// `bin_bytes` is the length of the .bin file.
Manifest parse_manifest(std::string_view text, int64_t bin_bytes, std::string_view where);

}  // namespace moeflux
