// What the fuzz targets share. Each target is one file with LLVMFuzzerTestOneInput: it gives the input to a reader and,
// when that accepts it, checks what the reader promises. FormatError is the one way to refuse; all else is a finding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "format/tensor_entry.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace moeflux::fuzz {

inline void require(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", promise);
  std::abort();
}

inline std::string_view as_text(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

inline std::span<const std::byte> as_bytes(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const std::byte*>(data), size};
}

// A message becomes a Python exception: short, one line, valid UTF-8, starting with the place.
inline void check_message(const FormatError& error, std::string_view where) {
  const std::string_view message = error.what();
  require(message.substr(0, where.size()) == where, "a message starts with the place");
  require(message.size() < 8192, "a message is short");
  for (size_t at = 0; at < message.size();) {
    const size_t length = utf8_sequence(message, at);
    require(length > 0 && static_cast<unsigned char>(message[at]) >= 0x20, "a message is one line of UTF-8");
    at += length;
  }
}

// Every tensor lies within [begin, end), has the length that its shape says, and shares no byte with another.
inline void check_tensors(std::vector<const TensorEntry*> tensors, int64_t begin, int64_t end) {
  for (const TensorEntry* tensor : tensors) {
    unsigned __int128 bytes = dtype_bytes(tensor->dtype);
    for (int64_t extent : tensor->shape) {
      require(extent >= 0, "no negative extent");
      bytes *= static_cast<uint64_t>(extent);
      if (bytes > UINT64_MAX) bytes = UINT64_MAX;  // stays too large unless an extent is 0
    }
    require(tensor->bytes >= 0 && bytes == static_cast<uint64_t>(tensor->bytes), "bytes are what the shape says");
    require(tensor->offset >= begin && tensor->offset <= end, "a tensor starts within the file");
    require(tensor->bytes <= end - tensor->offset, "a tensor ends within the file");
  }
  sort_by_offset(tensors);
  for (size_t i = 1; i < tensors.size(); ++i)
    require(tensors[i - 1]->offset + tensors[i - 1]->bytes <= tensors[i]->offset, "tensors share no byte");
}

}  // namespace moeflux::fuzz
