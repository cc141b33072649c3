// The input is a safetensors file; once as it is, and once as the start of the largest file there can be.
#include <limits>

#include "format/safetensors.h"
#include "target.h"

using namespace moeflux;

namespace {

void check(std::span<const std::byte> bytes, int64_t file_bytes) {
  SafetensorsHeader header;
  try {
    header = parse_safetensors_header(bytes, file_bytes, "input");
  } catch (const FormatError& error) {
    fuzz::check_message(error, "input");
    return;
  }
  fuzz::require(header.header_bytes >= 8, "the header holds its length");
  fuzz::require(header.header_bytes <= static_cast<int64_t>(bytes.size()), "the header lies within the bytes read");
  std::vector<const TensorEntry*> tensors;
  int64_t covered = 0;
  for (const TensorEntry& tensor : header.tensors) {
    tensors.push_back(&tensor);
    covered += tensor.bytes;
  }
  fuzz::check_tensors(tensors, header.header_bytes, file_bytes);
  fuzz::require(covered == file_bytes - header.header_bytes, "tensors cover the file, without holes");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  check(fuzz::as_bytes(data, size), static_cast<int64_t>(size));
  check(fuzz::as_bytes(data, size), std::numeric_limits<int64_t>::max());
  return 0;
}
