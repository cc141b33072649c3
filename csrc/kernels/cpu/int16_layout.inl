// Where the parts of a converted row of x lie (see int16.h).
#pragma once

#include "kernels/cpu/int16.h"
#include "kernels/cpu/simd.h"

namespace moeflux::cpu::MOEFLUX_ISA {

struct DigitRow {
  const uint8_t* digits;  // or whole numbers
  const float* units;
  const float* sums;
  const int32_t* whole_sums;
};

MOEFLUX_INLINE DigitRow digit_row(const uint8_t* row, int64_t columns, int64_t group_size) {
  const float* units = reinterpret_cast<const float*>(row + int16_blocks(columns) * int16_block_bytes);
  const int64_t groups = int16_groups(columns, group_size);
  return {row, units, units + groups, reinterpret_cast<const int32_t*>(units + 2 * groups)};
}

// Of numbers of which the largest has these bits: the unit, and how many of them one is.
struct Unit {
  float unit;
  float inverse;
};

MOEFLUX_INLINE Unit unit_of(int32_t largest_bits) {
  constexpr int32_t min_bits = 27 << 23;  // 2^-100, so that neither the unit nor its inverse leaves the normal numbers
  const int32_t bits = largest_bits > min_bits ? largest_bits : min_bits;
  float size;
  __builtin_memcpy(&size, &bits, sizeof size);
  // The two roundings are too small for the largest number to become more than it should.
  return {largest_bits >= 0x7f800000 ? __builtin_nanf("") : size / static_cast<float>(largest_int16),
          static_cast<float>(largest_int16) / size};
}

// total + a group's part of the product: the one place that rounds.
MOEFLUX_INLINE Floats add_group(Floats total, Floats sum, Floats scale, Floats bias, Floats unit, Floats x_sum) {
  return fma(bias, x_sum, fma(sum, scale * unit, total));
}

}  // namespace moeflux::cpu::MOEFLUX_ISA
