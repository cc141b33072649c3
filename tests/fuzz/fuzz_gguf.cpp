// The input is a GGUF file; once as it is, and once as the start of a longer one, now and then of the longest there can
// be.
#include <algorithm>
#include <cstring>
#include <limits>

#include "format/gguf.h"
#include "target.h"

using namespace moeflux;

namespace {

void check_value(const GgufValue& value, int depth) {
  fuzz::require(depth <= gguf_max_depth + 1, "arrays are not deeper than the limit");
  fuzz::require(value.numbers.size() ==
                    (gguf_kind_bytes(value.kind) ? static_cast<size_t>(value.count) : 0) * gguf_kind_bytes(value.kind),
                "there are as many numbers as the value says");
  for (const std::string& text : value.strings)
    for (size_t at = 0; at < text.size();) {
      const size_t length = utf8_sequence(text, at);
      fuzz::require(length > 0, "a string is UTF-8");
      at += length;
    }
  for (const GgufValue& inner : value.arrays) check_value(inner, depth + 1);
}

void check_tensors(const GgufHeader& header, int64_t file_bytes) {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (const auto& [name, tensor] : header.tensors) {
    unsigned __int128 bytes = static_cast<uint64_t>(tensor.type.bytes);
    for (const int64_t size : tensor.shape) {
      fuzz::require(size > 0, "sizes are positive");
      bytes *= static_cast<uint64_t>(size);
    }
    fuzz::require(bytes == static_cast<unsigned __int128>(tensor.bytes) * static_cast<uint64_t>(tensor.type.columns),
                  "bytes are what the shape says");
    fuzz::require(tensor.offset >= header.bytes && tensor.bytes <= file_bytes - tensor.offset,
                  "a tensor lies within the data");
    ranges.emplace_back(tensor.offset, tensor.bytes);
  }
  std::ranges::sort(ranges);
  for (size_t i = 1; i < ranges.size(); ++i)
    fuzz::require(ranges[i - 1].first + ranges[i - 1].second <= ranges[i].first, "tensors share no byte");
}

// Bytes that nobody has given are zeros.
void check(std::span<const std::byte> bytes, int64_t file_bytes) {
  const auto read = [&](int64_t offset, std::span<std::byte> into) {
    fuzz::require(offset >= 0 && static_cast<int64_t>(into.size()) <= file_bytes - offset, "reads lie within the file");
    if (offset > static_cast<int64_t>(bytes.size())) throw FormatError("input: the zeros are not read to their end");
    const auto given = bytes.subspan(static_cast<size_t>(offset));
    const size_t count = std::min(given.size(), into.size());
    std::ranges::copy(given.first(count), into.begin());
    std::ranges::fill(into.subspan(count), std::byte{0});
  };
  GgufHeader header;
  try {
    header = parse_gguf_header(read, file_bytes, "input");
  } catch (const FormatError& error) {
    fuzz::check_message(error, "input");
    return;
  }
  fuzz::require(header.version == 2 || header.version == 3, "the version is known");
  for (const auto& [key, value] : header.values) check_value(value, 1);
  check_tensors(header, file_bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  check(fuzz::as_bytes(data, size), static_cast<int64_t>(size));
  // A whole window of zeros takes a hundred times as long as the rest: one input of sixteen has it.
  const int64_t zeros = 4096;
  check(fuzz::as_bytes(data, size),
        size % 16 == 0 ? std::numeric_limits<int64_t>::max() : static_cast<int64_t>(size) + zeros);
  return 0;
}
