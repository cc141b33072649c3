// The JSON of a Variant: what is accepted comes back from its own JSON, and all sizes made of it stay numbers.
#include "format/snapshot_wire.h"
#include "format/variant_json.h"
#include "json_text.h"
#include "target.h"

using namespace moeflux;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Variant variant;
  try {
    variant = parse_variant(fuzz::as_text(data, size), "input");
  } catch (const FormatError& error) {
    fuzz::require(std::string_view(error.what()) != "", "a message is not empty");
    return 0;
  }
  fuzz::require(parse_variant(fuzz::json_text(variant_to_json(variant)), "rewritten") == variant,
                "a variant is unchanged when written and read again");

  // Products of widths: the sanitizer objects when one leaves int64.
  int64_t least = variant.q_proj_out();
  for (int64_t width : {variant.o_proj_in(), variant.kv_dim(), variant.kv_a_out(), variant.kv_b_out(),
                        variant.conv_channels(), variant.conv_state_bytes(), variant.recurrent_state_bytes()})
    least = width < least ? width : least;
  fuzz::require(least >= 0, "widths are not negative");
  try {
    const SnapshotWire wire = snapshot_wire_layout(variant, 2, max_context_limit);
    fuzz::require(wire.bytes > 0, "a snapshot has bytes");
  } catch (const FormatError&) {  // a pattern or a size that the wire format cannot say
  }
  return 0;
}
