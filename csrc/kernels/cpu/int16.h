// Products of quantised matrices in whole numbers. The codes are whole numbers already. Rows of x are converted once
// for all the matrices that they meet.
//
// A group is the columns that share a scale of the matrix. Its numbers become x[j] = unit * q[j], where the largest of
// them is 32639 units. q is a whole number of 16 bits in two digits of base 256, each -128 ... 127: q = 256 * high +
// low. Then
//   sum of w[j] * x[j] = (unit * scale) * sum of code[j] * q[j] + bias * (unit * sum of q[j])
// Codes of some formats are raised to be 0 or more: one of MXFP4 or NVFP4 is 12 more than twice the number it stands
// for, and its scale is half that of the group. There, so many times the sum of q are taken off before anything is
// rounded, and there is no bias:
//   sum of w[j] * x[j] = (unit * scale) * (sum of code[j] * q[j] - raised * sum of q[j])
// All these sums are whole numbers, exact in any order, and fit in 32 bits for every width of codes and groups.
// Instructions that multiply bytes compute them, or words of 16 bits, each in its own order, and all come to the same
// bits. Who multiplies words takes q as it is, and codes with their sign. Only two things
// are rounded: q, by half a unit, and the chain of multiply-adds over the groups, which is in the order of the columns.
// NVFP4 has eight chains: the groups at one place of every block of 128 columns are one. They are added up two by two,
// and the sum is multiplied by the scale of the row.
//
// So an element of a product depends neither on the number of rows nor on the instructions that computed it. Numbers of
// a normal distribution come out with a relative error of about 2.2e-5; bf16 has 1.7e-3.
//
// A group that holds a NaN or an infinity makes every product that it takes part in a NaN. Numbers that are small
// beside 2^-100 become 0, which any other number of the row would drown anyway. Above 2^90 sums may overflow.
#pragma once

#include <cstdint>

#include "kernels/cpu/matmul.h"

namespace moeflux::cpu {

constexpr int64_t largest_int16 = 127 * 256 + 127;

// Digits lie in blocks of 128 columns, taken as 4 stretches of 32. First come 64 bytes with the high digits of the even
// columns, 16 of each stretch after the other, then 64 of the odd columns, then the same of the low digits. Codes of 4
// bits come out of their bytes in this order. Where words are multiplied, a stretch is its 16 even columns and then its
// odd ones, two bytes each. Zeros follow the last column. After the blocks lie the units of the groups as f32, then
// unit * sum of q, then the sums of q as whole numbers, all for the groups of whole blocks.
constexpr int64_t int16_block = 128;
constexpr int64_t int16_block_bytes = 2 * int16_block;

constexpr int64_t int16_blocks(int64_t columns) { return (columns + int16_block - 1) / int16_block; }
constexpr int64_t int16_groups(int64_t columns, int64_t group_size) {
  return int16_blocks(columns) * (int16_block / group_size);
}

// Bytes of one row of x, whole cache lines.
constexpr int64_t int16_row_bytes(int64_t columns, int64_t group_size) {
  const int64_t bytes = int16_blocks(columns) * int16_block_bytes + int16_groups(columns, group_size) * 3 * 4;
  return (bytes + 63) / 64 * 64;
}

// What the same thread reads next, if that is known. It is prefetched while the last rows are computed.
struct ReadNext {
  const uint8_t* codes = nullptr;  // null: what follows those rows in memory
  const uint8_t* scales = nullptr;
  const uint8_t* biases = nullptr;
};

struct Int16Kernels {
  // x [columns] to 16-bit integers, on a cache line.
  void (*convert)(const float* x, int64_t columns, int64_t group_size, uint8_t* digits);
  // As `MatmulKernels::multiply`, for a quantised matrix and rows of x converted with its group size.
  void (*multiply)(const Weights& weights, int64_t first, int64_t last, const uint8_t* const* x, float* const* out,
                   int64_t n, const ReadNext& next);
};

}  // namespace moeflux::cpu
