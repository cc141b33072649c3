// The JSON of a Variant, of either version: what is accepted comes back from its own JSON, and all sizes made of it
// stay numbers.
#include <optional>

#include "format/snapshot_wire.h"
#include "format/tensor_requirements.h"
#include "format/variant_json.h"
#include "json_text.h"
#include "target.h"

using namespace moeflux;

namespace {

std::optional<Variant> read(std::string_view text, int version) {
  try {
    return variant_from_json(parse_json(text, "input"), "input", version);
  } catch (const FormatError& error) {
    fuzz::require(std::string_view(error.what()) != "", "a message is not empty");
    return {};
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  for (int version = 1; version <= variant_version; ++version) {
    const std::optional<Variant> variant = read(fuzz::as_text(data, size), version);
    if (!variant) continue;
    fuzz::require(parse_variant(fuzz::json_text(variant_to_json(*variant)), "rewritten") == *variant,
                  "a variant is unchanged when written and read again");
    if (const std::optional<Json> before = variant_to_json_1(*variant))
      fuzz::require(variant_from_json(*before, "rewritten", 1) == *variant, "version 1 says the same");

    // Products of widths: the sanitizer objects when one leaves int64.
    for (const TensorRequirement& tensor : tensor_requirements(*variant, [](const std::string&) { return false; }))
      for (const int64_t extent : tensor.shape) fuzz::require(extent > 0, "tensors have numbers");
    for (int64_t layer = 0; layer < variant->num_layers(); ++layer)
      for (const StatePiece& piece : variant->state(layer)) fuzz::require(piece.width() > 0, "states have numbers");
    try {
      const SnapshotWire wire = snapshot_wire_layout(*variant, 2, max_context_limit);
      fuzz::require(wire.bytes > 0, "a snapshot has bytes");
    } catch (const FormatError&) {  // a pattern or a size that the wire format cannot say
    }
  }
  return 0;
}
