#include "format/tensor_entry.h"

#include <algorithm>
#include <array>
#include <tuple>

#include "core/checked.h"
#include "core/error.h"
#include "core/text.h"

namespace moeflux {
namespace {

constexpr std::array all_dtypes = {DType::u8,      DType::u32, DType::bf16, DType::f16, DType::f32,
                                   DType::f8_e4m3, DType::i32, DType::i64,  DType::i8};

}  // namespace

std::optional<DType> dtype_from_name(std::string_view name) {
  for (DType dtype : all_dtypes)
    if (dtype_name(dtype) == name) return dtype;
  return std::nullopt;
}

DType dtype_of(const Json& entry, std::string_view where) {
  const Json* field = entry.find("dtype");
  const std::string* name = field ? field->string() : nullptr;
  const std::optional<DType> dtype = name ? dtype_from_name(*name) : std::nullopt;
  if (dtype) return *dtype;
  std::string known;
  for (DType candidate : all_dtypes) known += concat(known.empty() ? "" : ", ", dtype_name(candidate));
  wrong_value(concat(where, ": dtype"), concat("one of ", known), field);
}

std::vector<int64_t> shape_of(const Json& entry, std::string_view where) {
  const Json* field = entry.find("shape");
  const Json::Array* items = field ? field->array() : nullptr;
  if (!items) wrong_value(concat(where, ": shape"), "an array", field);
  if (items->size() > tensor_max_rank)
    throw FormatError(
        concat(where, ": shape: expected at most ", tensor_max_rank, " dimensions, found ", items->size()));
  std::vector<int64_t> shape;
  for (const Json& item : *items) {
    const int64_t* size = item.integer();
    if (!size || *size < 0) wrong_value(concat(where, ": shape"), "whole numbers of 0 and above", &item);
    shape.push_back(*size);
  }
  return shape;
}

int64_t bytes_of_shape(const TensorEntry& entry, std::string_view where) {
  const auto bytes = checked_product(entry.shape, static_cast<int64_t>(dtype_bytes(entry.dtype)));
  if (!bytes)
    throw FormatError(
        concat(where, ": shape: expected a size within 63 bits, found ", describe_shape(entry.dtype, entry.shape)));
  return *bytes;
}

std::string describe_shape(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += concat(i ? ", " : "", shape[i]);
  return text + "]";
}

std::string describe_shape(DType dtype, std::span<const int64_t> shape) {
  return concat(dtype_name(dtype), " ", describe_shape(shape));
}

void sort_by_offset(std::vector<const TensorEntry*>& entries) {
  std::sort(entries.begin(), entries.end(), [](const TensorEntry* a, const TensorEntry* b) {
    return std::tie(a->offset, a->bytes, a->name) < std::tie(b->offset, b->bytes, b->name);
  });
}

void check_no_overlap(const std::vector<const TensorEntry*>& entries, std::string_view where) {
  const TensorEntry* before = nullptr;
  for (const TensorEntry* entry : entries) {
    if (before && entry->offset < before->offset + before->bytes)
      throw FormatError(concat(where, ": tensor ", in_quotes(entry->name), ": expected bytes of its own, found [",
                               entry->offset, ", ", entry->offset + entry->bytes, ") overlapping ",
                               in_quotes(before->name), " [", before->offset, ", ", before->offset + before->bytes,
                               ")"));
    if (entry->bytes > 0) before = entry;
  }
}

}  // namespace moeflux
