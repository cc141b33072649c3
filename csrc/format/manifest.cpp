#include "format/manifest.h"

#include "core/checked.h"
#include "core/error.h"
#include "core/text.h"
#include "format/json.h"

namespace moeflux {
namespace {

constexpr int default_bits = 4;

int64_t count_field(const Json& entry, std::string_view key, std::string_view where) {
  const Json* field = entry.find(key);
  const int64_t* count = field ? field->integer() : nullptr;
  if (!count || *count < 0) wrong_value(concat(where, ": ", key), "a whole number of 0 and above", field);
  return *count;
}

int bits_of(const Json& entry, DType dtype, std::string_view where) {
  if (dtype != DType::u32) return 0;
  const Json* field = entry.find("bits");
  if (!field) return default_bits;
  const int64_t* bits = field->integer();
  if (!bits || *bits < 1 || *bits > 32) wrong_value(concat(where, ": bits"), "a whole number from 1 to 32", field);
  return static_cast<int>(*bits);
}

BlockType block_of(const Json& entry, DType dtype, std::string_view where) {
  const Json* field = entry.find("block");
  if (!field) return BlockType::none;
  const std::string* name = field->string();
  const BlockType block = name ? block_type_named(*name) : BlockType::none;
  if (block == BlockType::none || dtype != DType::u8)
    wrong_value(concat(where, ": block"), "the name of a type of blocks, and dtype U8", field);
  return block;
}

ManifestEntry entry_of(const JsonMember& member, int64_t bin_bytes, std::string_view where) {
  const std::string here = concat(where, ": tensor ", in_quotes(member.key));
  const Json& fields = member.value;
  if (!fields.object()) wrong_value(here, "an object", &fields);
  TensorEntry tensor{member.key, dtype_of(fields, here), shape_of(fields, here), 0, 0};
  tensor.offset = count_field(fields, "offset", here);
  tensor.bytes = count_field(fields, "size", here);
  if (tensor.offset % packed_alignment != 0)
    throw FormatError(concat(here, ": offset: expected a multiple of ", packed_alignment, ", found ", tensor.offset));
  const int64_t expected = bytes_of_shape(tensor, here);
  if (tensor.bytes != expected)
    throw FormatError(concat(here, ": size: expected ", expected, " bytes for ",
                             describe_shape(tensor.dtype, tensor.shape), ", found ", tensor.bytes));
  const auto end = checked_add(tensor.offset, tensor.bytes);
  if (!end || *end > bin_bytes)
    throw FormatError(concat(here, ": expected it within the ", bin_bytes, " bytes of the weight file, found offset ",
                             tensor.offset, " + size ", tensor.bytes));
  const int bits = bits_of(fields, tensor.dtype, here);
  const BlockType block = block_of(fields, tensor.dtype, here);
  return {std::move(tensor), bits, block};
}

}  // namespace

Manifest parse_manifest(std::string_view text, int64_t bin_bytes, std::string_view where) {
  const Json json = parse_json(text, where);
  const Json* tensors = json.find("tensors");
  if (!json.object()) wrong_value(where, "an object", &json);
  if (!tensors || !tensors->object()) wrong_value(concat(where, ": tensors"), "an object", tensors);
  Manifest manifest;
  for (const JsonMember& member : *tensors->object()) manifest.tensors.push_back(entry_of(member, bin_bytes, where));
  std::vector<const TensorEntry*> order;
  for (const ManifestEntry& entry : manifest.tensors) order.push_back(&entry.tensor);
  sort_by_offset(order);
  check_no_overlap(order, where);
  return manifest;
}

}  // namespace moeflux
