// How the numbers of one matrix are stored. The one description that readers, kernels and the oracle share.
//
// Affine: a row of n columns is n codes of `bits` bits, packed little-endian without gaps into u32 words (code c starts
// at bit c*bits of the row), and for each `group_size` columns one scale and one bias of type `scale_type`:
//   weight[row][col] = code * scale[row][col / group_size] + bias[row][col / group_size]
// MXFP4: codes of 4 bits likewise, each a float E2M1: a sign, two bits of exponent, one of mantissa. A group of 32 has
// a scale of 8 bits, the exponent of a power of two, and no bias:
//   weight[row][col] = e2m1[code] * 2^(scale[row][col / 32] - 127)
// Blocks: a row is whole blocks of GGUF's type `block`, which hold scales and codes: one tensor of bytes.
// Plain: the elements themselves, of type `element`.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/block_types.h"
#include "core/dtype.h"
#include "core/error.h"

namespace moeflux {

// The type of that name. Plain weights, scales and biases may be BF16, F16 or F32.
inline DType weight_dtype(std::string_view name, std::string_view where) {
  for (const DType type : {DType::bf16, DType::f16, DType::f32})
    if (dtype_name(type) == name) return type;
  throw FormatError(concat(where, ": expected BF16, F16 or F32, found ", name));
}

struct QuantFormat {
  DType element = DType::u32;         // of the stored tensor: u32 for codes, u8 for blocks, else bf16, f16 or f32
  int bits = 0;                       // of a code; 0 for plain
  int group_size = 0;                 // columns that share a scale; 0 for plain
  DType scale_type = DType::bf16;     // of scales and biases; u8 for MXFP4, meaningless for blocks and plain
  BlockType block = BlockType::none;  // of blocks only

  static QuantFormat affine(int bits, int group_size, DType scale_type = DType::bf16) {
    const bool known_bits = bits == 2 || bits == 3 || bits == 4 || bits == 5 || bits == 6 || bits == 8;
    if (!known_bits) throw FormatError(concat("bits: expected 2, 3, 4, 5, 6 or 8, found ", bits));
    if (group_size != 32 && group_size != 64 && group_size != 128)
      throw FormatError(concat("group_size: expected 32, 64 or 128, found ", group_size));
    if (scale_type != DType::bf16 && scale_type != DType::f16 && scale_type != DType::f32)
      throw FormatError(concat("scale type: expected BF16, F16 or F32, found ", dtype_name(scale_type)));
    return {DType::u32, bits, group_size, scale_type, BlockType::none};
  }

  static QuantFormat plain(DType element) {
    if (element != DType::bf16 && element != DType::f16 && element != DType::f32)
      throw FormatError(concat("element type: expected BF16, F16 or F32, found ", dtype_name(element)));
    return {element, 0, 0, DType::bf16, BlockType::none};
  }

  static QuantFormat mxfp4() { return {DType::u32, 4, 32, DType::u8, BlockType::none}; }

  static QuantFormat blocks(BlockType type) {
    if (type == BlockType::none) throw FormatError("type of blocks: expected one that GGUF has, found none");
    return {DType::u8, block_shape(type).bits, block_shape(type).group, DType::f16, type};
  }

  bool is_quantised() const { return bits != 0; }
  bool is_blocks() const { return block != BlockType::none; }
  bool is_mxfp4() const { return is_quantised() && !is_blocks() && scale_type == DType::u8; }
  bool is_affine() const { return is_quantised() && !is_blocks() && !is_mxfp4(); }
  // In a tensor of their own.
  bool has_scales() const { return is_quantised() && !is_blocks(); }

  // A row must be whole blocks, or whole groups and whole words. Codes of any number of bits fill whole words in groups
  // of 32 or more.
  int64_t whole_columns() const { return is_blocks() ? block_shape(block).columns : is_quantised() ? group_size : 1; }
  bool fits(int64_t columns) const { return columns > 0 && columns % whole_columns() == 0; }

  int64_t weight_row_bytes(int64_t columns) const {
    if (is_blocks()) return columns / block_shape(block).columns * block_shape(block).bytes;
    return is_quantised() ? columns * bits / 8 : columns * static_cast<int64_t>(dtype_bytes(element));
  }

  // The columns of a row of so many stored elements. If they are no whole blocks or groups, either the columns do not
  // fit, or so many columns take another number of elements.
  int64_t columns_of(int64_t elements) const {
    if (is_blocks()) return elements / block_shape(block).bytes * block_shape(block).columns;
    return is_quantised() ? elements * 32 / bits : elements;
  }

  // Bytes of a row's scales. Its biases, if it has any, take as many.
  int64_t scale_row_bytes(int64_t columns) const {
    return has_scales() ? columns / group_size * static_cast<int64_t>(dtype_bytes(scale_type)) : 0;
  }

  int64_t row_bytes(int64_t columns) const {
    return weight_row_bytes(columns) + (is_affine() ? 2 : 1) * scale_row_bytes(columns);
  }

  // "4-bit g64", "4-bit g64 F16 scales", "MXFP4", "Q4_K", "BF16"
  std::string describe() const {
    if (is_blocks()) return std::string(block_shape(block).name);
    if (is_mxfp4()) return "MXFP4";
    if (!is_quantised()) return std::string(dtype_name(element));
    const std::string text = concat(bits, "-bit g", group_size);
    return scale_type == DType::bf16 ? text : concat(text, " ", dtype_name(scale_type), " scales");
  }

  bool operator==(const QuantFormat&) const = default;
};

}  // namespace moeflux
