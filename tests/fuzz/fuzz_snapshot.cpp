// The input is a snapshot of one of three tiny models.
#include <algorithm>
#include <array>

#include "format/snapshot_wire.h"
#include "target.h"

using namespace moeflux;

namespace {

Variant of(const std::string& name, const std::vector<Mixer>& mixers) {
  Variant variant;
  variant.name = name;
  for (const Mixer& mixer : mixers) variant.layers.push_back({mixer, DenseMlp{}});
  return variant;
}

// Both kinds of layer; a position of a full layer is 8 bytes of k and of v.
const GroupedAttention full = {1, 1, 2, {}, false};
const GatedDelta delta = {1, 1, 1, 1, 2};
const LatentAttention latent = {1, 0, 3, 0, 0, {2, 0, {}}};

const std::array<Variant, 3>& variants() {
  static const std::array<Variant, 3> all = {of("hybrid", {delta, full, delta, full}), of("grouped", {full, full}),
                                             of("latent", {latent, latent})};
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
    if (i % 2 == 0 && variant.state(span.layer).front().rows) {
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
  fuzz::require(wire.spans.size() == 2 * variant.layers.size(), "every layer has two states");
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
