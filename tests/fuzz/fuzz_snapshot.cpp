// The input is a snapshot of one of three tiny models.
#include <algorithm>
#include <array>

#include "format/snapshot_wire.h"
#include "target.h"

using namespace moeflux;

namespace {

// Both kinds of layer; a position of a full layer is 8 bytes of k and of v.
Variant hybrid() {
  Variant variant;
  variant.name = "hybrid";
  variant.layer_kinds = {LayerKind::linear, LayerKind::full, LayerKind::linear, LayerKind::full};
  variant.mlp_kinds.assign(4, MlpKind::moe);
  variant.num_kv_heads = 1;
  variant.head_dim = 2;
  variant.linear_key_heads = variant.linear_value_heads = variant.linear_key_dim = variant.linear_value_dim = 1;
  variant.conv_kernel = 2;
  return variant;
}

Variant grouped() {
  Variant variant = hybrid();
  variant.name = "grouped";
  variant.layer_kinds = {LayerKind::full, LayerKind::full};
  variant.mlp_kinds.assign(2, MlpKind::moe);
  variant.linear_key_heads = variant.linear_value_heads = variant.linear_key_dim = variant.linear_value_dim = 0;
  variant.conv_kernel = 0;
  return variant;
}

Variant latent() {
  Variant variant = grouped();
  variant.name = "latent";
  variant.attention = Attention::mla;
  variant.kv_lora_rank = 3;
  variant.qk_rope_dim = 2;
  return variant;
}

const std::array<Variant, 3>& variants() {
  static const std::array<Variant, 3> all = {hybrid(), grouped(), latent()};
  return all;
}

void check(std::span<const std::byte> bytes, const Variant& variant) {
  SnapshotWire wire;
  try {
    wire = parse_snapshot_wire(bytes, variant, "input");
  } catch (const FormatError& error) {
    fuzz::check_message(error, "input: ");
    return;
  }
  // Header, length words and spans follow each other from the first byte to the last.
  int64_t end = wire.header_bytes;
  size_t length = 0;
  for (size_t i = 0; i < wire.spans.size(); ++i) {
    const SnapshotSpan& span = wire.spans[i];
    if (i % 2 == 0 && variant.is_full(span.layer)) {
      fuzz::require(length < wire.length_offsets.size() && wire.length_offsets[length] == end,
                    "a full layer starts with its length");
      ++length;
      end += 4;
    }
    fuzz::require(span.layer == static_cast<int64_t>(i / 2), "every layer has two states");
    fuzz::require(span.offset == end && span.bytes >= 0, "spans are in order, without holes and overlaps");
    end += span.bytes;
  }
  fuzz::require(length == wire.length_offsets.size(), "only full layers have lengths");
  fuzz::require(end == static_cast<int64_t>(bytes.size()) && wire.bytes == end, "spans cover the snapshot exactly");
  fuzz::require(wire.spans.size() == 2 * variant.layer_kinds.size(), "every layer has two states");
  fuzz::require(wire == snapshot_wire_layout(variant, wire.version, wire.positions),
                "read equals what would be written");
  const std::vector<std::byte> header = snapshot_wire_header(variant, wire.version);
  fuzz::require(header.size() == static_cast<size_t>(wire.header_bytes) &&
                    std::equal(header.begin(), header.end(), bytes.begin()),
                "the header is what would be written");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  for (const Variant& variant : variants()) check(fuzz::as_bytes(data, size), variant);
  return 0;
}
