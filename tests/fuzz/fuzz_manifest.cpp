// model_weights.json, against a weight file of one page and one larger than any disk.
#include <limits>

#include "format/manifest.h"
#include "target.h"

using namespace moeflux;

namespace {

void check(std::string_view text, int64_t bin_bytes) {
  Manifest manifest;
  try {
    manifest = parse_manifest(text, bin_bytes, "input");
  } catch (const FormatError& error) {
    fuzz::check_message(error, "input");
    return;
  }
  std::vector<const TensorEntry*> tensors;
  for (const ManifestEntry& entry : manifest.tensors) {
    fuzz::require(entry.tensor.offset % packed_alignment == 0, "a tensor starts at a multiple of the alignment");
    fuzz::require((entry.bits != 0) == (entry.tensor.dtype == DType::u32), "only codes have bits");
    tensors.push_back(&entry.tensor);
  }
  fuzz::check_tensors(tensors, 0, bin_bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  check(fuzz::as_text(data, size), 4096);
  check(fuzz::as_text(data, size), std::numeric_limits<int64_t>::max());
  return 0;
}
