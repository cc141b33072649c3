// How the numbers of one matrix are stored. The one description that readers, kernels and the oracle share.
//
// Affine: a row of n columns is n codes of `bits` bits, packed little-endian without gaps into u32 words (code c starts
// at bit c*bits of the row), and for each `group_size` columns one scale and one bias of type `scale_type`:
//   weight[row][col] = code * scale[row][col / group_size] + bias[row][col / group_size]
// MXFP4: codes of 4 bits likewise, each a float E2M1: a sign, two bits of exponent, one of mantissa. A group of 32 has
// a scale of 8 bits, the exponent of a power of two, and no bias:
//   weight[row][col] = e2m1[code] * 2^(scale[row][col / 32] - 127)
// NVFP4: the same codes, and a group of 16 has a scale E4M3, a float of 8 bits. A row of scales begins with a scale f32
// of the whole row, in which NVIDIA's tools keep that of a tensor; MLX has none:
//   weight[row][col] = e2m1[code] * (e4m3[scale[row][col / 16]] * scale_of_row[row])
// MXFP8: codes E4M3 of 8 bits, and scales as those of MXFP4.
// FP8: codes E4M3, a byte each, and for 128 columns a scale f32 or bf16, which the rows of a block have alike.
// Blocks: a row is whole blocks of GGUF's type `block`, which hold scales and codes: one tensor of bytes.
// Plain: the elements themselves, of type `element`.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
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
  DType element = DType::u32;      // of the stored tensor: u32 for codes, u8 for blocks, f8_e4m3 for those of FP8,
                                   // else bf16, f16 or f32
  int bits = 0;                    // of a code; 0 for plain
  int group_size = 0;              // columns that share a scale; 0 for plain
  DType scale_type = DType::bf16;  // of scales and biases; u8 for MXFP4 and MXFP8, f8_e4m3 for NVFP4, meaningless for
                                   // blocks and plain
  BlockType block = BlockType::none;  // of blocks only
  int row_scale_bytes = 0;            // at the beginning of a row of scales: 4 if the row has one of its own

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
  static QuantFormat mxfp8() { return {DType::u32, 8, 32, DType::u8, BlockType::none}; }
  static QuantFormat nvfp4(bool with_row_scales) {
    return {DType::u32, 4, 16, DType::f8_e4m3, BlockType::none, with_row_scales ? 4 : 0};
  }
  static QuantFormat fp8(DType scale_type) {
    if (scale_type != DType::bf16 && scale_type != DType::f32)
      throw FormatError(concat("scale type of FP8: expected BF16 or F32, found ", dtype_name(scale_type)));
    return {DType::f8_e4m3, 8, 128, scale_type, BlockType::none};
  }

  // Codes that are floats, by the names that `describe` gives.
  static constexpr std::array<std::string_view, 6> float_names = {"MXFP4",     "MXFP8", "NVFP4",
                                                                  "MLX_NVFP4", "FP8",   "FP8_F32"};
  static std::optional<QuantFormat> float_named(std::string_view name) {
    for (const QuantFormat& format : {mxfp4(), mxfp8(), nvfp4(true), nvfp4(false), fp8(DType::bf16), fp8(DType::f32)})
      if (format.describe() == name) return format;
    return std::nullopt;
  }

  static QuantFormat blocks(BlockType type) {
    if (type == BlockType::none) throw FormatError("type of blocks: expected one that GGUF has, found none");
    return {DType::u8, block_shape(type).bits, block_shape(type).group, DType::f16, type};
  }

  bool is_quantised() const { return bits != 0; }
  bool is_blocks() const { return block != BlockType::none; }
  bool has_float_codes() const {
    return is_quantised() && !is_blocks() &&
           (element == DType::f8_e4m3 || scale_type == DType::u8 || scale_type == DType::f8_e4m3);
  }
  bool is_mxfp4() const { return has_float_codes() && bits == 4 && scale_type == DType::u8; }
  bool is_nvfp4() const { return has_float_codes() && bits == 4 && scale_type == DType::f8_e4m3; }
  bool is_affine() const { return is_quantised() && !is_blocks() && !has_float_codes(); }
  // Whether its codes are whole numbers of a byte, or become such. Those of E4M3 have too many digits.
  bool has_whole_codes() const { return is_quantised() && !(has_float_codes() && bits == 8); }
  // In a tensor of their own.
  bool has_scales() const { return is_quantised() && !is_blocks(); }

  // A row must be whole blocks, or whole groups and whole words. Codes of any number of bits fill whole words in 32
  // columns, which kernels take together; two groups of NVFP4 are so many.
  int64_t whole_columns() const {
    return is_blocks() ? block_shape(block).columns : is_quantised() ? std::max(group_size, 32) : 1;
  }
  bool fits(int64_t columns) const { return columns > 0 && columns % whole_columns() == 0; }

  int64_t weight_row_bytes(int64_t columns) const {
    if (is_blocks()) return columns / block_shape(block).columns * block_shape(block).bytes;
    return is_quantised() ? columns * bits / 8 : columns * static_cast<int64_t>(dtype_bytes(element));
  }

  // The columns of a row of so many stored elements. If they are no whole blocks or groups, either the columns do not
  // fit, or so many columns take another number of elements.
  int64_t columns_of(int64_t elements) const {
    if (is_blocks()) return elements / block_shape(block).bytes * block_shape(block).columns;
    return element == DType::u32 ? elements * 32 / bits : elements;
  }

  // Bytes of a row's scales. Its biases, if it has any, take as many.
  int64_t scale_row_bytes(int64_t columns) const {
    return has_scales() ? row_scale_bytes + columns / group_size * static_cast<int64_t>(dtype_bytes(scale_type)) : 0;
  }

  int64_t row_bytes(int64_t columns) const {
    return weight_row_bytes(columns) + (is_affine() ? 2 : 1) * scale_row_bytes(columns);
  }

  // "4-bit g64", "4-bit g64 F16 scales", "MXFP4", "Q4_K", "BF16"
  std::string describe() const {
    if (is_blocks()) return std::string(block_shape(block).name);
    if (element == DType::f8_e4m3) return scale_type == DType::bf16 ? "FP8" : "FP8_F32";
    if (is_nvfp4()) return row_scale_bytes ? "NVFP4" : "MLX_NVFP4";
    if (has_float_codes()) return bits == 4 ? "MXFP4" : "MXFP8";
    if (!is_quantised()) return std::string(dtype_name(element));
    const std::string text = concat(bits, "-bit g", group_size);
    return scale_type == DType::bf16 ? text : concat(text, " ", dtype_name(scale_type), " scales");
  }

  bool operator==(const QuantFormat&) const = default;
};

}  // namespace moeflux
