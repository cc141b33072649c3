// What a matrix as stored is to the kernels: the arguments that say so, the end of a kernel's name, and how many rows
// of x a block takes through it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "backend/backend.h"
#include "core/error.h"
#include "cuda/cuda_commands.h"

namespace moeflux::cuda {

inline uint32_t number_of(const QuantFormat& format) {
  const DType type = format.is_quantised() ? format.scale_type : format.element;
  if (type == DType::u8) return number_u8;
  if (type == DType::f8_e4m3) return format.row_scale_bytes ? number_e4m3_of_rows : number_e4m3;
  return type == DType::bf16 ? number_bf16 : type == DType::f16 ? number_f16 : number_f32;
}

// Whether tensor cores multiply its codes with digits of x. Of others, codes become f32.
inline bool has_digits(const QuantFormat& format) { return format.is_affine() || format.is_mxfp4(); }

inline uint32_t group_steps_of(const QuantFormat& format) {
  return has_digits(format) ? static_cast<uint32_t>(format.group_size) / step_columns : 1;
}

inline StoredMatrix stored(const Matrix& m) {
  return {address<const uint8_t>(m.weight), address<const uint8_t>(m.scales), address<const uint8_t>(m.biases)};
}

// A warp for each part of the columns, up to the most that a block has.
inline uint32_t product_threads(int64_t columns) {
  return lanes * std::min(product_warps, divide_up(columns, part_columns));
}

// Formats with kernels of their own, for matrices that are aligned. These take more rows together, too.
inline bool is_known(const QuantFormat& format) {
  if (format.is_mxfp4()) return true;
  return format.is_affine() && format.scale_type != DType::f32 &&
         ((format.bits == 4 && format.group_size <= 64) || (format.bits == 8 && format.group_size == 64));
}
// Whose tiles may lie in shared memory, where they are multiplied by one row.
inline bool has_copied_format(const QuantFormat& format) {
  return is_known(format) && !format.is_mxfp4() && format.group_size == 64;
}
// A tile of sixteen rows in shared memory.
inline uint32_t tile_bytes(uint32_t columns, uint32_t bits) {
  return copied_tile_bytes(columns / pack * bits, columns / part_columns * 4);
}
// Whether a row of it, or one output of it for each number of such a row, is longer than the warps of a block can have
// as digits.
inline bool are_wide(int64_t rows, int64_t columns) {
  return std::max(rows, columns) > int64_t{copied_warps} * copied_parts * part_columns;
}
// Where codes, and all scales of a part, may be loaded together. Nothing of MXFP4 is. `base`: where the matrix is
// counted from.
inline bool is_aligned(const Matrix& matrix, int64_t base) {
  if (matrix.format.is_mxfp4()) return true;
  const auto divides = [&](const View& view, int64_t by) { return !view || (view.offset - base) % by == 0; };
  return matrix.columns % part_columns == 0 && divides(matrix.weight, 16) && divides(matrix.scales, 8) &&
         divides(matrix.biases, 8);
}
inline bool is_aligned(const Matrix& matrix) {
  return is_aligned(matrix.weight.buffer->data()) && is_aligned(matrix, 0);
}

// The end of a kernel's name.
inline std::string bits_name(const QuantFormat& format) {
  if (format.is_blocks()) return format.describe();
  if (!format.has_float_codes()) return concat(format.bits);
  return concat(format.bits == 8 ? e4m3 : format.is_mxfp4() ? e2m1 : nvfp4);
}
inline std::string format_name(const QuantFormat& format, bool aligned) {
  const bool has_own = is_known(format) && aligned && !format.is_mxfp4();
  return has_own ? concat(bits_name(format), "_", format.group_size) : bits_name(format);
}

// The rows of x that a block takes together.
inline int64_t rows_of_block(const QuantFormat& format, int64_t n, bool aligned) {
  if (n == 1) return 1;
  if (!format.is_quantised()) return plain_rows;
  if (!has_digits(format)) return few_rows;
  if (n <= few_rows || !is_known(format) || !aligned) return few_rows;
  return n > many_rows ? most_rows : many_rows;
}
inline const char* kind_of(int64_t rows) {
  return rows == 1 ? "_one_" : rows == most_rows ? "_most_" : rows == many_rows ? "_many_" : "_few_";
}
// In shared memory: parts of the rows of x of a block that takes many.
inline uint32_t many_bytes(const QuantFormat& format, int64_t rows) {
  return many_bytes(group_steps_of(format), divide_up(rows, fragment_rows));
}

// The rows of x that a block of an expert takes, of which each has so many pairs. Where most experts would not fill a
// large block, it is a smaller one.
inline int64_t usual_pairs(int64_t pairs, int64_t experts) {
  const int64_t usual = std::max<int64_t>(2, pairs / experts * 2);
  return usual < most_rows ? std::min<int64_t>(usual, many_rows) : usual;
}

// The outputs of a block where x has no digits.
inline int64_t plain_outputs_of(const QuantFormat& format, int64_t rows) {
  return plain_warps * int64_t{rows == 1 && format.is_quantised() ? one_outputs : plain_outputs};
}

// Blocks of pairs of one expert, however the pairs are distributed.
inline int64_t most_blocks(int64_t pairs, int64_t experts, int64_t rows) {
  return std::min(pairs, std::min(pairs, experts) + pairs / rows);
}

inline int64_t digit_bytes(int64_t fragments, int64_t columns) {
  return fragments * fragment_rows * columns * digits_of_number;
}
inline int64_t group_bytes(int64_t fragments, int64_t groups) {
  return fragments * fragment_rows * groups * static_cast<int64_t>(sizeof(DigitGroup));
}

}  // namespace moeflux::cuda
