// Products of quantised matrices, and what becomes of gate and up, with the bits of the CUDA kernels. cuda/products.h
// has the definition of the products, cuda/basics.h that of the rest. So what a GPU would make of an expert, the CPU
// makes of it, too.
//
// The whole numbers that a group of columns comes to are exact, in whatever order an instruction set adds them. What
// follows is f32 in the one order of the definition, with multiply-adds that round once. So every instruction set gives
// the same bits. Of a NaN only that it is one.
//
// This is for affine matrices and for MXFP4.
#pragma once

#include <cstdint>

#include "kernels/cpu/matmul.h"

namespace moeflux::cpu {

constexpr int64_t digit_step = 32;       // columns whose digits lie together
constexpr int64_t digits_of_number = 3;  // signed bytes, of a whole number of 22 bits and a sign
constexpr int64_t digit_part = 128;      // columns whose groups are added up before the parts are
constexpr int64_t digit_together = 8;    // groups that a vector has
constexpr int64_t digit_e2m1_zero = 12;  // the code of zero, of MXFP4 as an affine format

// Bytes of a row of x as digits: of each step its first digits, then the second, then the third. Then the unit of each
// group, then the sum of its whole numbers, both f32 for whole vectors of groups.
constexpr int64_t digit_groups(int64_t columns, int64_t group_size) {
  return (columns / group_size + digit_together - 1) / digit_together * digit_together;
}
constexpr int64_t digit_row_bytes(int64_t columns, int64_t group_size) {
  return columns * digits_of_number + 2 * 4 * digit_groups(columns, group_size);
}

// What gate and up meet in: SwiGLU, or GeGLU, or with a limit above 0 clamped_swiglu.
struct DigitJoin {
  float alpha = 0;
  float limit = 0;
  bool is_geglu = false;
};

struct DigitKernels {
  // x [columns] as digits for matrices of the bits and group size of these weights.
  void (*convert)(const Weights& weights, const float* x, uint8_t* row);
  // out[r] = W[r] . x for matrix rows first ... last - 1, and such a row of digits.
  void (*multiply)(const Weights& weights, int64_t first, int64_t last, const uint8_t* row, float* out);
  // out[i] = what becomes of gate[i] and up[i]. In place, always.
  void (*join)(const float* gate, const float* up, float* out, int64_t count, const DigitJoin& how);
  // out[i] = e^x[i], as `join` has it: within two units of the last place.
  void (*exp)(const float* x, float* out, int64_t count);
};

}  // namespace moeflux::cpu
