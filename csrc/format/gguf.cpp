#include "format/gguf.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "core/checked.h"
#include "core/error.h"
#include "core/file.h"
#include "core/rounding.h"
#include "core/text.h"
#include "format/tensor_entry.h"

namespace moeflux {
namespace {

constexpr std::string_view magic = "GGUF";
constexpr int64_t default_alignment = 32;
constexpr size_t window_bytes = size_t{1} << 20;
constexpr std::string_view alignment_key = "general.alignment";

constexpr std::array kind_names = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                   "bool", "string", "array", "u64", "i64", "f64"};

struct OtherType {
  uint32_t number;
  GgufType type;
};

// Those that are no blocks which kernels read. Two more are of numbers on their way through a product, never of a file.
constexpr std::array other_types = {
    OtherType{0, {"F32", 1, 4}},        OtherType{1, {"F16", 1, 2}},         OtherType{16, {"IQ2_XXS", 256, 66}},
    OtherType{17, {"IQ2_XS", 256, 74}}, OtherType{18, {"IQ3_XXS", 256, 98}}, OtherType{19, {"IQ1_S", 256, 50}},
    OtherType{21, {"IQ3_S", 256, 110}}, OtherType{22, {"IQ2_S", 256, 82}},   OtherType{24, {"I8", 1, 1}},
    OtherType{25, {"I16", 1, 2}},       OtherType{26, {"I32", 1, 4}},        OtherType{27, {"I64", 1, 8}},
    OtherType{28, {"F64", 1, 8}},       OtherType{29, {"IQ1_M", 256, 56}},   OtherType{30, {"BF16", 1, 2}},
    OtherType{34, {"TQ1_0", 256, 54}},  OtherType{35, {"TQ2_0", 256, 66}},   OtherType{40, {"NVFP4", 64, 36}},
    OtherType{41, {"Q1_0", 128, 18}},
};

// ---- The reader of a header -----------------------------------------------------------------------------------------

// Goes through a file from its start, reading a window at a time.
class HeaderReader {
 public:
  HeaderReader(const GgufRead& read, int64_t file_bytes, std::string_view where)
      : read_(read), file_bytes_(file_bytes), limit_(std::min(file_bytes, gguf_max_header)), where_(where) {}

  int64_t at() const { return at_; }
  std::string_view where() const { return where_; }

  // FormatError unless `bytes` more are there.
  void require(uint64_t bytes, std::string_view what) const {
    if (bytes <= static_cast<uint64_t>(limit_ - at_)) return;
    const std::string_view end = limit_ < file_bytes_ ? "of the longest header" : "of the file";
    throw FormatError(concat(where_, ": ", what, ": expected ", bytes, " bytes at byte ", at_, ", found ", limit_ - at_,
                             " before the end ", end));
  }

  void take(std::span<std::byte> into, std::string_view what) {
    require(into.size(), what);
    for (size_t done = 0; done < into.size();) {
      if (at_ < begin_ || at_ >= begin_ + static_cast<int64_t>(window_.size())) refill();
      const auto from = static_cast<size_t>(at_ - begin_);
      const size_t count = std::min(into.size() - done, window_.size() - from);
      std::memcpy(into.data() + done, window_.data() + from, count);
      done += count;
      at_ += static_cast<int64_t>(count);
    }
  }

  uint32_t u32(std::string_view what) { return static_cast<uint32_t>(little_endian<4>(what)); }
  uint64_t u64(std::string_view what) { return little_endian<8>(what); }

  std::string string(std::string_view what, uint64_t longest) {
    const uint64_t length = u64(what);
    if (length > longest)
      throw FormatError(concat(where_, ": ", what, ": expected at most ", longest, " bytes, found ", length));
    require(length, what);
    std::string text(static_cast<size_t>(length), '\0');
    take(std::as_writable_bytes(std::span(text)), what);
    for (size_t i = 0; i < text.size();) {
      const size_t sequence = utf8_sequence(text, i);
      if (sequence == 0)
        throw FormatError(
            concat(where_, ": ", what, ": expected UTF-8, found byte ", i, " of ", in_quotes(text, 60), " to be none"));
      i += sequence;
    }
    return text;
  }

  // Counts what takes much more memory than its bytes in the file.
  void count(uint64_t more, std::string_view what) {
    if (more > gguf_max_values - counted_)
      throw FormatError(concat(where_, ": ", what, ": expected at most ", gguf_max_values,
                               " keys, strings, arrays and tensors, found ", more, " besides ", counted_));
    counted_ += static_cast<size_t>(more);
  }

 private:
  template <size_t bytes>
  uint64_t little_endian(std::string_view what) {
    std::array<std::byte, bytes> raw;
    take(raw, what);
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; ++i) value |= static_cast<uint64_t>(raw[i]) << (8 * i);
    return value;
  }

  void refill() {
    begin_ = at_;
    window_.resize(std::min(window_bytes, static_cast<size_t>(limit_ - at_)));
    read_(begin_, window_);
  }

  const GgufRead& read_;
  int64_t file_bytes_;
  int64_t limit_;
  std::string_view where_;
  int64_t at_ = 0;
  int64_t begin_ = 0;
  std::vector<std::byte> window_;
  size_t counted_ = 0;
};

// ---- Values ---------------------------------------------------------------------------------------------------------

GgufKind kind_of(HeaderReader& file, std::string_view what) {
  const uint32_t kind = file.u32(what);
  if (kind >= kind_names.size())
    throw FormatError(
        concat(file.where(), ": ", what, ": kind: expected 0 to ", kind_names.size() - 1, ", found ", kind));
  return static_cast<GgufKind>(kind);
}

void take_numbers(HeaderReader& file, GgufValue& value, std::string_view what) {
  const size_t size = gguf_kind_bytes(value.kind);
  file.require(static_cast<uint64_t>(value.count) * size, what);  // count is at most the bytes that there are
  value.numbers.resize(static_cast<size_t>(value.count) * size);
  file.take(value.numbers, what);
  if (value.kind != GgufKind::boolean) return;
  for (const std::byte flag : value.numbers)
    if (flag > std::byte{1})
      throw FormatError(
          concat(file.where(), ": ", what, ": expected 0 or 1 for a bool, found ", std::to_integer<int>(flag)));
}

GgufValue value_of(HeaderReader& file, GgufKind kind, std::string_view what);

GgufValue array_of(HeaderReader& file, std::string_view what, int depth) {
  if (depth > gguf_max_depth)
    throw FormatError(
        concat(file.where(), ": ", what, ": expected arrays at most ", gguf_max_depth, " deep, found deeper ones"));
  GgufValue value;
  value.is_array = true;
  value.kind = kind_of(file, what);
  const uint64_t count = file.u64(what);
  // An element takes a byte at least, so no count is larger than the file. More is checked as they come.
  file.require(count, what);
  value.count = static_cast<int64_t>(count);
  if (gguf_kind_bytes(value.kind) != 0) {
    take_numbers(file, value, what);
    return value;
  }
  file.count(count, what);
  for (uint64_t i = 0; i < count; ++i) {
    if (value.kind == GgufKind::string)
      value.strings.push_back(file.string(what, gguf_max_header));
    else
      value.arrays.push_back(array_of(file, what, depth + 1));
  }
  return value;
}

GgufValue value_of(HeaderReader& file, GgufKind kind, std::string_view what) {
  if (kind == GgufKind::array) return array_of(file, what, 1);
  GgufValue value;
  value.kind = kind;
  if (kind == GgufKind::string)
    value.strings.push_back(file.string(what, gguf_max_header));
  else
    take_numbers(file, value, what);
  return value;
}

void take_values(HeaderReader& file, uint64_t count, GgufHeader& header) {
  file.count(count, "keys");
  for (uint64_t i = 0; i < count; ++i) {
    std::string key = file.string(concat("key ", i), gguf_max_key);
    if (key.empty()) throw FormatError(concat(file.where(), ": key ", i, ": expected a name, found none"));
    const std::string what = concat("key ", in_quotes(key, 80));
    const GgufKind kind = kind_of(file, what);
    if (!header.values.emplace(std::move(key), value_of(file, kind, what)).second)
      throw FormatError(concat(file.where(), ": ", what, ": expected it once, found it twice"));
  }
}

// ---- Tensors --------------------------------------------------------------------------------------------------------

int64_t alignment_of(const GgufHeader& header, std::string_view where) {
  const auto found = header.values.find(std::string(alignment_key));
  if (found == header.values.end()) return default_alignment;
  int64_t alignment = 0;
  const bool fits = found->second.kind == GgufKind::u32 && found->second.whole(alignment);
  if (!fits || alignment < 8 || (alignment & (alignment - 1)) != 0 || alignment > gguf_max_header)
    throw FormatError(concat(where, ": ", alignment_key, ": expected a u32 that is a power of two of 8 to ",
                             gguf_max_header, ", found ",
                             fits ? std::to_string(alignment) : kind_names[static_cast<size_t>(found->second.kind)]));
  return alignment;
}

// Its offset is still that in the data.
GgufTensor tensor_of(HeaderReader& file, const std::string& what) {
  GgufTensor tensor;
  const uint32_t rank = file.u32(what);
  if (rank > gguf_max_rank)
    throw FormatError(
        concat(file.where(), ": ", what, ": expected at most ", gguf_max_rank, " dimensions, found ", rank));
  for (uint32_t i = 0; i < rank; ++i) {
    const uint64_t size = file.u64(what);
    if (size == 0 || size > static_cast<uint64_t>(INT64_MAX))
      throw FormatError(
          concat(file.where(), ": ", what, ": size ", i, ": expected 1 to ", INT64_MAX, ", found ", size));
    tensor.shape.insert(tensor.shape.begin(), static_cast<int64_t>(size));
  }
  const uint32_t number = file.u32(what);
  const std::optional<GgufType> type = gguf_type(number);
  if (!type)
    throw FormatError(
        concat(file.where(), ": ", what, ": type: expected a number that stands for one, found ", number));
  tensor.type = *type;
  const int64_t row = tensor.shape.empty() ? 1 : tensor.shape.back();
  if (row % type->columns != 0)
    throw FormatError(concat(file.where(), ": ", what, ": expected rows of whole blocks of ", type->columns,
                             " numbers in ", type->name, ", found ", describe_shape(tensor.shape)));
  std::vector<int64_t> blocks = tensor.shape;
  if (!blocks.empty()) blocks.back() /= type->columns;
  const auto bytes = checked_product(blocks, type->bytes);
  if (!bytes)
    throw FormatError(concat(file.where(), ": ", what, ": expected a size within 63 bits, found ", type->name, " ",
                             describe_shape(tensor.shape)));
  tensor.bytes = *bytes;
  const uint64_t offset = file.u64(what);
  if (offset > static_cast<uint64_t>(INT64_MAX))
    throw FormatError(concat(file.where(), ": ", what, ": offset: expected at most ", INT64_MAX, ", found ", offset));
  tensor.offset = static_cast<int64_t>(offset);
  return tensor;
}

void take_tensors(HeaderReader& file, uint64_t count, GgufHeader& header) {
  file.count(count, "tensors");
  for (uint64_t i = 0; i < count; ++i) {
    std::string name = file.string(concat("tensor ", i, ": name"), gguf_max_name);
    if (name.empty()) throw FormatError(concat(file.where(), ": tensor ", i, ": expected a name, found none"));
    const std::string what = concat("tensor ", in_quotes(name));
    if (!header.tensors.emplace(std::move(name), tensor_of(file, what)).second)
      throw FormatError(concat(file.where(), ": ", what, ": expected it once, found it twice"));
  }
}

// Makes the offsets those in the file, and checks them.
void place_tensors(GgufHeader& header, int64_t alignment, int64_t file_bytes, std::string_view where) {
  for (auto& [name, tensor] : header.tensors) {
    const std::string what = concat(where, ": tensor ", in_quotes(name));
    if (tensor.offset % alignment != 0)
      throw FormatError(concat(what, ": offset: expected a multiple of ", alignment, ", found ", tensor.offset));
    const auto begin = checked_add(tensor.offset, header.bytes);
    const auto end = begin ? checked_add(*begin, tensor.bytes) : std::nullopt;
    if (!end || *end > file_bytes)
      throw FormatError(concat(what, ": expected its ", tensor.bytes, " bytes to lie within the file of ", file_bytes,
                               " bytes, found them at byte ", tensor.offset, " of the data, which begins at byte ",
                               header.bytes));
    tensor.offset = *begin;
  }
  std::vector<std::pair<int64_t, const std::string*>> order;
  for (const auto& [name, tensor] : header.tensors) order.emplace_back(tensor.offset, &name);
  std::ranges::sort(order, {}, [](const auto& each) { return each.first; });
  for (size_t i = 1; i < order.size(); ++i) {
    const GgufTensor& before = header.tensors.at(*order[i - 1].second);
    if (order[i].first < before.offset + before.bytes)
      throw FormatError(concat(where, ": tensor ", in_quotes(*order[i].second),
                               ": expected bytes of its own, found it ", "at byte ", order[i].first, ", and ",
                               in_quotes(*order[i - 1].second), " at bytes ", before.offset, " to ",
                               before.offset + before.bytes - 1));
  }
}

}  // namespace

// ---- The header -----------------------------------------------------------------------------------------------------

size_t gguf_kind_bytes(GgufKind kind) {
  switch (kind) {
    case GgufKind::u8:
    case GgufKind::i8:
    case GgufKind::boolean:
      return 1;
    case GgufKind::u16:
    case GgufKind::i16:
      return 2;
    case GgufKind::u32:
    case GgufKind::i32:
    case GgufKind::f32:
      return 4;
    case GgufKind::u64:
    case GgufKind::i64:
    case GgufKind::f64:
      return 8;
    case GgufKind::string:
    case GgufKind::array:
      return 0;
  }
  return 0;
}

const std::string* GgufValue::string() const {
  return !is_array && kind == GgufKind::string ? &strings.front() : nullptr;
}

bool GgufValue::whole(int64_t& number) const {
  const bool real = kind == GgufKind::f32 || kind == GgufKind::f64 || kind == GgufKind::boolean;
  if (is_array || real || numbers.empty()) return false;
  uint64_t bits = 0;
  for (size_t i = 0; i < numbers.size(); ++i) bits |= static_cast<uint64_t>(numbers[i]) << (8 * i);
  const bool is_signed = kind == GgufKind::i8 || kind == GgufKind::i16 || kind == GgufKind::i32;
  const auto spare = static_cast<int>(64 - 8 * numbers.size());
  number = is_signed ? static_cast<int64_t>(bits << spare) >> spare : static_cast<int64_t>(bits);
  return kind != GgufKind::u64 || number >= 0;
}

std::optional<GgufType> gguf_type(uint32_t number) {
  if (const BlockType block = block_type_numbered(number); block != BlockType::none)
    return GgufType{block_shape(block).name, block_shape(block).columns, block_shape(block).bytes, block};
  const auto found = std::ranges::find(other_types, number, &OtherType::number);
  return found == other_types.end() ? std::nullopt : std::optional(found->type);
}

GgufHeader parse_gguf_header(const GgufRead& read, int64_t file_bytes, std::string_view where) {
  HeaderReader file(read, file_bytes, where);
  std::array<std::byte, magic.size()> first;
  file.take(first, "header");
  const std::string_view found(reinterpret_cast<const char*>(first.data()), first.size());
  if (found != magic)
    throw FormatError(
        concat(where, ": expected ", in_quotes(magic), " first, found ", in_quotes(found), ": this is no GGUF file"));
  GgufHeader header;
  header.version = file.u32("version");
  if (header.version != 2 && header.version != 3) {
    const bool swapped = (header.version & 0xffff) == 0 && header.version != 0;
    throw FormatError(concat(where, ": version: expected 2 or 3, found ", header.version,
                             swapped ? ": a file for machines of the other byte order" : ""));
  }
  const uint64_t tensors = file.u64("number of tensors");
  const uint64_t values = file.u64("number of keys");
  take_values(file, values, header);
  take_tensors(file, tensors, header);
  const int64_t alignment = alignment_of(header, where);
  header.bytes = round_up(file.at(), alignment);
  place_tensors(header, alignment, file_bytes, where);
  return header;
}

}  // namespace moeflux
