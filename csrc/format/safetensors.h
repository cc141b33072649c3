// The directory of a safetensors file.
//
//   u64 little-endian: length n of the header | n bytes of JSON | tensor bytes, without holes
//   header: {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, ...,
//            "__metadata__": {"key": "text"}}
//
// Offsets in the file count from the end of the header; here all are absolute. Checked: the header starts with '{' and
// has at most safetensors_max_header bytes; every tensor has a known dtype, lies within the file and has the length
// that its shape and dtype say; the tensors cover the data exactly, without overlaps and holes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "format/tensor_entry.h"

namespace moeflux {

constexpr int64_t safetensors_max_header = 100'000'000;

struct SafetensorsHeader {
  int64_t header_bytes = 0;  // the u64 and the JSON: where the data starts
  std::map<std::string, std::string> metadata;
  std::vector<TensorEntry> tensors;  // in the order of the header
};

// `bytes` are the first bytes of the file, at least the header; `file_bytes` is the length of the file.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> bytes, int64_t file_bytes,
                                           std::string_view where);

SafetensorsHeader read_safetensors_header(const std::string& path);

}  // namespace moeflux
