// One tensor in a file's directory: its fields as JSON, and the checks that both kinds of directory need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "format/json.h"

namespace moeflux {

constexpr size_t tensor_max_rank = 8;

// A tensor as a file holds it, one contiguous range.
struct TensorEntry {
  std::string name;
  DType dtype = DType::u8;
  std::vector<int64_t> shape;
  int64_t offset = 0;  // from the start of the file
  int64_t bytes = 0;
};

// The type of that name; nothing when it is not one of ours.
std::optional<DType> dtype_from_name(std::string_view name);

// The members "dtype" and "shape" of an entry. `where` names file and tensor.
DType dtype_of(const Json& entry, std::string_view where);
std::vector<int64_t> shape_of(const Json& entry, std::string_view where);

// product(shape) * size of the dtype; FormatError when it leaves int64.
int64_t bytes_of_shape(const TensorEntry& entry, std::string_view where);

// "BF16 [2, 3]"
std::string describe_shape(DType dtype, std::span<const int64_t> shape);
std::string describe_shape(std::span<const int64_t> shape);

// By offset, empty tensors before the one that starts at the same byte.
void sort_by_offset(std::vector<const TensorEntry*>& entries);

// `entries` are sorted by offset.
void check_no_overlap(const std::vector<const TensorEntry*>& entries, std::string_view where);

}  // namespace moeflux
