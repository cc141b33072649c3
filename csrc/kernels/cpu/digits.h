// Products of quantised matrices in whole numbers: the codes are such already, and rows of x are made so once for all
// the matrices they meet.
//
// The numbers of a group, the columns that share a scale of the matrix, become x[j] = unit * q[j]. The unit is a power
// of two; q is a whole number of up to 23 bits and a sign, in three digits of base 256, each -128 ... 127:
// q = 2^16 * high + 2^8 * middle + low. Then
//   sum of w[j] * x[j] = (unit * scale) * sum of code[j] * q[j] + bias * (unit * sum of q[j])
// where both sums are whole numbers, exact in any order: instructions that multiply bytes make them, each in its own
// order, and all come to the same bits. For them to fit in 32 bits with codes of 4, the unit is chosen so that the
// sizes of a group's q add up to less than 2^27. What is rounded is q, by at most 2^-22.9 of the largest number of its
// group or 2^-27 of the sum of their sizes, whichever is more, and the chain of multiply-adds over the groups, which is
// in the order of the columns. Numbers of usual sizes come out as exactly as in f32.
//
// So an element of a product depends neither on how many rows there are nor on which instructions computed it.
//
// A group that holds a NaN or an infinity makes NaN of every product it has part in. Numbers below 2^-126 become 0, and
// groups of numbers below 2^-80 lose precision as unit * scale leaves the normal numbers: nothing that another number
// of the row would not drown. Above 2^90 sums may overflow.
#pragma once

#include <cstdint>

#include "kernels/cpu/matmul.h"

namespace moeflux::cpu {

// Digits lie in blocks of 64 columns: the 64 high ones, the middle ones, the low ones, each the even columns first,
// then the odd ones, as codes of 4 bits come out of their bytes. Zeros behind the last column. Behind the blocks lie
// the units of the groups as f32, then unit * sum of q, both for an even number of groups.
constexpr int64_t digit_block = 64;
constexpr int64_t digit_block_bytes = 3 * digit_block;

constexpr int64_t digit_blocks(int64_t columns) { return (columns + digit_block - 1) / digit_block; }
constexpr int64_t digit_groups(int64_t columns, int64_t group_size) { return (columns / group_size + 1) / 2 * 2; }

// Bytes of one row of x, whole cache lines.
constexpr int64_t digit_row_bytes(int64_t columns, int64_t group_size) {
  const int64_t bytes = digit_blocks(columns) * digit_block_bytes + digit_groups(columns, group_size) * 2 * 4;
  return (bytes + 63) / 64 * 64;
}

// Codes of 5 bits and more would want two sums a group, for one would not fit in 32 bits; and where memory limits, with
// so many bytes a weight, f32 is as fast.
constexpr bool meets_digits(int bits) { return bits >= 2 && bits <= 4; }

struct DigitKernels {
  // x [columns] to digits, on a cache line.
  void (*convert)(const float* x, int64_t columns, int64_t group_size, uint8_t* digits);
  // As `MatmulKernels::multiply`, for an affine matrix whose codes meet digits, and rows of x converted with its group
  // size.
  void (*multiply)(const Weights& weights, int64_t first, int64_t last, const uint8_t* const* x, float* const* out,
                   int64_t n);
};

}  // namespace moeflux::cpu
