#include "format/snapshot_wire.h"

#include <cstdio>
#include <limits>
#include <optional>
#include <string>

#include "core/error.h"
#include "models/variant.h"

namespace moeflux {
namespace {

constexpr int64_t word_bytes = 4;
constexpr int64_t f32_bytes = 4;

// A word of the header after magic and version, under the name it has in messages.
struct ShapeWord {
  const char* field;
  int64_t value;
};

// Whether the layer's state grows. Only such layers have a length.
StatePieces state_of(const Layer& layer) {
  return std::visit([](const auto& each) { return each.state(); }, layer.mixer);
}

bool has_rows(const Layer& layer) { return state_of(layer).front().rows; }

// n if exactly the layers n-1, 2n-1, ... have rows, and the layers of each of the two kinds are alike. Otherwise 0.
int64_t row_interval(const Variant& variant) {
  int64_t interval = 0;
  while (interval < variant.num_layers() && !has_rows(variant.layer(interval))) ++interval;
  if (interval++ == variant.num_layers()) return 0;
  for (int64_t i = 0; i < variant.num_layers(); ++i) {
    const bool full = (i + 1) % interval == 0;
    const Mixer& alike = variant.layer(full ? interval - 1 : 0).mixer;
    if (has_rows(variant.layer(i)) != full || variant.layer(i).mixer != alike) return 0;
  }
  return interval;
}

// A layer of that kind, or one of no size where there is none.
template <typename Kind>
Kind first_of(const Variant& variant) {
  for (const Layer& layer : variant.layers)
    if (const Kind* found = std::get_if<Kind>(&layer.mixer)) return *found;
  return {};
}

std::vector<ShapeWord> shape_words(const Variant& variant, uint32_t version, std::string_view where) {
  const auto full = first_of<GroupedAttention>(variant);
  const auto latent = first_of<LatentAttention>(variant);
  if (version != 1 && version != 2)
    throw SnapshotError(where, {.name = "BadVersion", .field = "version", .expected = 2, .found = version},
                        concat("expected 1 or 2, found ", version));
  if (version == 1 && latent.heads > 0)
    throw SnapshotError(where, {.name = "BadVersion", .field = "version", .expected = 2, .found = 1},
                        "expected 2 for latent attention, found 1");
  if (latent.index || full.index)
    throw SnapshotError(where, {.name = "NoInterval", .field = "index"},
                        concat("expected attention without an index, found one in ", variant.name,
                               ", whose keys this format cannot say"));
  if (has_tables(variant))
    throw SnapshotError(
        where, {.name = "NoInterval", .field = "full_attn_interval"},
        concat("expected a model without n-gram embeddings, whose state this format cannot say, found ", variant.name));
  const int64_t interval = row_interval(variant);
  if (interval == 0)
    throw SnapshotError(where, {.name = "NoInterval", .field = "full_attn_interval"},
                        concat("expected full attention in every n-th layer of ", variant.name,
                               ", found another pattern, which this format cannot say"));

  const auto delta = first_of<GatedDelta>(variant);
  const StatePieces fixed = delta.state();
  std::vector<ShapeWord> words = {{"num_layers", variant.num_layers()},
                                  {"full_attn_interval", interval},
                                  {"num_kv_heads", full.kv_heads + latent.heads},
                                  {"head_dim", full.head_dim + latent.head_dim()},
                                  {"linear_conv_bytes", delta.taps ? fixed[0].width() * f32_bytes : 0},
                                  {"linear_ssm_bytes", fixed[1].width() * f32_bytes}};
  if (version == 2) {
    words.push_back({"kv_lora_rank", latent.kv_rank});
    words.push_back({"qk_rope_head_dim", latent.rope.dim});
  }
  for (const ShapeWord& word : words)
    if (word.value < 0 || word.value > std::numeric_limits<uint32_t>::max())
      throw SnapshotError(
          where, {.name = "ShapeMismatch", .field = word.field, .found = word.value},
          concat(word.field, ": expected a number of 32 bits, found ", word.value, " in ", variant.name));
  return words;
}

int64_t header_bytes_of(const std::vector<ShapeWord>& words) {
  return static_cast<int64_t>(words.size() + 2) * word_bytes;
}

// A variant's limits and max_context_limit keep all sums within int64.
int64_t bytes_of(const StatePiece& piece, int64_t positions) {
  return (piece.rows ? positions : 1) * piece.width() * f32_bytes;
}

// Goes through the snapshot's bytes from first to last, and takes each of them once.
class Cursor {
 public:
  Cursor(std::span<const std::byte> bytes, std::string_view where) : bytes_(bytes), where_(where) {}

  int64_t offset() const { return offset_; }
  int64_t left() const { return static_cast<int64_t>(bytes_.size()) - offset_; }

  // Passes over `count` bytes and returns where they start. `what` names them if they are not there.
  int64_t take(int64_t count, const std::string& what, std::optional<int64_t> layer = {}) {
    if (left() < count) {
      const std::string name = layer ? concat("layer ", *layer, ", ", what) : what;
      throw SnapshotError(where_,
                          {.name = "Truncated", .field = what, .layer = layer, .expected = count, .found = left()},
                          concat(name, ": expected ", count, " bytes at byte ", offset_, ", found ", left()));
    }
    offset_ += count;
    return offset_ - count;
  }

  uint32_t take_word(const std::string& what, std::optional<int64_t> layer = {}) {
    const std::byte* at = bytes_.data() + take(word_bytes, what, layer);
    uint32_t value = 0;
    for (int i = 0; i < word_bytes; ++i) value |= std::to_integer<uint32_t>(at[i]) << (8 * i);
    return value;
  }

 private:
  std::span<const std::byte> bytes_;
  std::string_view where_;
  int64_t offset_ = 0;
};

std::string hex(uint32_t value) {
  char text[2 + 2 * sizeof value + 1];
  std::snprintf(text, sizeof text, "0x%x", value);
  return text;
}

// Returns the version.
uint32_t check_header(Cursor& cursor, const Variant& variant, std::string_view where) {
  if (cursor.left() < 2 * word_bytes) cursor.take(2 * word_bytes, "magic and version");
  const uint32_t magic = cursor.take_word("magic");
  if (magic != snapshot_magic)
    throw SnapshotError(where, {.name = "BadMagic", .field = "magic", .expected = snapshot_magic, .found = magic},
                        concat("expected ", hex(snapshot_magic), ", found ", hex(magic)));
  const uint32_t version = cursor.take_word("version");
  const std::vector<ShapeWord> words = shape_words(variant, version, where);
  const int64_t rest = header_bytes_of(words) - cursor.offset();
  if (cursor.left() < rest) cursor.take(rest, "header");
  for (const ShapeWord& word : words) {
    const uint32_t found = cursor.take_word(word.field);
    if (found != word.value)
      throw SnapshotError(where, {.name = "ShapeMismatch", .field = word.field, .expected = word.value, .found = found},
                          concat(word.field, ": expected ", word.value, ", found ", found));
  }
  return version;
}

void check_length(int32_t found, int64_t layer, std::optional<int64_t> others, std::string_view where) {
  const auto fail = [&](const char* name, int64_t wanted, const std::string& expected) {
    throw SnapshotError(where, {.name = name, .field = "length", .layer = layer, .expected = wanted, .found = found},
                        concat("layer ", layer, ": expected ", expected, ", found ", found));
  };
  if (found < 0) fail("NegativeLen", 0, "0 or more positions");
  if (found > max_context_limit)
    fail("LenOverflow", max_context_limit, concat("at most ", max_context_limit, " positions"));
  if (others && found != *others)
    fail("UnequalLen", *others, concat(*others, " positions as in the full layers before"));
}

}  // namespace

std::vector<std::byte> snapshot_wire_header(const Variant& variant, uint32_t version) {
  std::vector<std::byte> header;
  const auto put = [&](uint32_t value) {
    for (int i = 0; i < word_bytes; ++i) header.push_back(static_cast<std::byte>(value >> (8 * i)));
  };
  const std::vector<ShapeWord> words = shape_words(variant, version, "snapshot header");
  put(snapshot_magic);
  put(version);
  for (const ShapeWord& word : words) put(static_cast<uint32_t>(word.value));
  return header;
}

SnapshotWire snapshot_wire_layout(const Variant& variant, uint32_t version, int64_t positions) {
  if (positions < 0 || positions > max_context_limit)
    throw FormatError(concat("snapshot layout: positions: expected 0 to ", max_context_limit, ", found ", positions));
  const int64_t header_bytes = header_bytes_of(shape_words(variant, version, "snapshot layout"));
  SnapshotWire wire{version, positions, header_bytes, header_bytes, {}, {}};
  int64_t index = 0;
  for (const Layer& layer : variant.layers) {
    const StatePieces pieces = state_of(layer);
    if (pieces.front().rows) {
      wire.length_offsets.push_back(wire.bytes);
      wire.bytes += word_bytes;
    }
    for (const StatePiece& piece : pieces) {
      const int64_t bytes = bytes_of(piece, positions);
      wire.spans.push_back({index, piece.name, wire.bytes, bytes});
      wire.bytes += bytes;
    }
    ++index;
  }
  return wire;
}

SnapshotWire parse_snapshot_wire(std::span<const std::byte> bytes, const Variant& variant, std::string_view where) {
  Cursor cursor(bytes, where);
  const uint32_t version = check_header(cursor, variant, where);
  SnapshotWire wire{version, 0, cursor.offset(), static_cast<int64_t>(bytes.size()), {}, {}};
  std::optional<int64_t> positions;
  int64_t index = 0;
  for (const Layer& layer : variant.layers) {
    const StatePieces pieces = state_of(layer);
    if (pieces.front().rows) {
      wire.length_offsets.push_back(cursor.offset());
      const auto length = static_cast<int32_t>(cursor.take_word("length", index));
      check_length(length, index, positions, where);
      positions = length;
    }
    for (const StatePiece& piece : pieces) {
      const int64_t piece_bytes = bytes_of(piece, positions.value_or(0));
      const int64_t offset = cursor.take(piece_bytes, std::string(piece.name), index);
      wire.spans.push_back({index, piece.name, offset, piece_bytes});
    }
    ++index;
  }
  if (cursor.left() > 0)
    throw SnapshotError(where,
                        {.name = "TrailingBytes", .field = "end", .expected = cursor.offset(), .found = wire.bytes},
                        concat("expected the end at byte ", cursor.offset(), ", found ", cursor.left(), " more bytes"));
  wire.positions = positions.value_or(0);  // a variant with an interval has a full layer
  return wire;
}

}  // namespace moeflux
