// Beside simd.h, for the same translation units: lanes moved between vectors, sums of several vectors at once, and rows
// that end within a vector.
#pragma once

#include <type_traits>

#include "kernels/cpu/simd.h"

// Marks code for rare cases, to keep it out of the loops around it.
#define MOEFLUX_COLD [[gnu::noinline, gnu::cold]] static

namespace moeflux::cpu::MOEFLUX_ISA {

constexpr float minus_infinity = -__builtin_inff();

MOEFLUX_INLINE int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }
MOEFLUX_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
MOEFLUX_INLINE int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

// Every second lane of a, then of b.
#if defined(__AVX512F__)
template <typename Vector>
MOEFLUX_INLINE Vector evens(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}
template <typename Vector>
MOEFLUX_INLINE Vector odds(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
#elif defined(__AVX2__)
template <typename Vector>
MOEFLUX_INLINE Vector evens(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
}
template <typename Vector>
MOEFLUX_INLINE Vector odds(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
}
#else
template <typename Vector>
MOEFLUX_INLINE Vector evens(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6);
}
template <typename Vector>
MOEFLUX_INLINE Vector odds(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, 1, 3, 5, 7);
}
#endif

// Lane i of the result is the sum of vector i, for `count` = lanes vectors. Neighbours are added first.
template <int64_t count, typename Vector>
MOEFLUX_INLINE Vector sums(const Vector* vectors) {
  if constexpr (count == 1) {
    return vectors[0];
  } else {
    const Vector low = sums<count / 2>(vectors);
    const Vector high = sums<count / 2>(vectors + count / 2);
    return evens(low, high) + odds(low, high);
  }
}

#if defined(__AVX512F__)
// The sum, or the largest, of 16 whole numbers. A sum wraps around: numbers that are not finite may make any whole
// ones, and then nobody uses it.
template <bool add>
MOEFLUX_INLINE int32_t reduce_whole(__m512i value) {
  using Whole = std::conditional_t<add, Words, Ints>;
  Whole v = (Whole)value;
  v = merge<add, Whole>(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = merge<add, Whole>(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = merge<add, Whole>(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = merge<add, Whole>(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return static_cast<int32_t>(v[0]);
}

// Transposes 16 vectors of 16 lanes: lane c of vector r becomes lane r of vector c.
MOEFLUX_INLINE void turn(__m512i (&v)[16]) {
  __m512i t[16];
  MOEFLUX_UNROLL
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_maskz_unpacklo_epi32(all_lanes, v[i], v[i + 1]);
    t[i + 1] = _mm512_maskz_unpackhi_epi32(all_lanes, v[i], v[i + 1]);
  }
  MOEFLUX_UNROLL
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_maskz_unpacklo_epi64(0xff, t[i], t[i + 2]);
    v[i + 1] = _mm512_maskz_unpackhi_epi64(0xff, t[i], t[i + 2]);
    v[i + 2] = _mm512_maskz_unpacklo_epi64(0xff, t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_maskz_unpackhi_epi64(0xff, t[i + 1], t[i + 3]);
  }
  MOEFLUX_UNROLL
  for (int i = 0; i < 4; ++i) {
    MOEFLUX_UNROLL
    for (int half = 0; half < 16; half += 8) {
      t[half + i] = _mm512_maskz_shuffle_i32x4(all_lanes, v[half + i], v[half + i + 4], 0x88);
      t[half + i + 4] = _mm512_maskz_shuffle_i32x4(all_lanes, v[half + i], v[half + i + 4], 0xdd);
    }
  }
  MOEFLUX_UNROLL
  for (int i = 0; i < 8; ++i) {
    v[i] = _mm512_maskz_shuffle_i32x4(all_lanes, t[i], t[i + 8], 0x88);
    v[i + 8] = _mm512_maskz_shuffle_i32x4(all_lanes, t[i], t[i + 8], 0xdd);
  }
}
#endif

MOEFLUX_INLINE float widen(float value) { return value; }
MOEFLUX_INLINE float widen(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float wide;
  __builtin_memcpy(&wide, &bits, sizeof wide);
  return wide;
}

MOEFLUX_INLINE float widen(int8_t value) { return value; }

// A vector of f32 or bf16 elements, or of codes.
MOEFLUX_INLINE Floats load_row(const float* from) { return load<Floats>(from); }
MOEFLUX_INLINE Floats load_row(const uint16_t* from) { return load_bf16(from); }
MOEFLUX_INLINE Floats load_row(const int8_t* from) { return __builtin_convertvector(load_codes(from), Floats); }

// The first `count` elements, then zeros.
MOEFLUX_INLINE Floats load_part(const float* from, int64_t count) { return load_some<Floats>(from, count); }
MOEFLUX_INLINE Floats load_part(const uint16_t* from, int64_t count) {
  return from_bf16(load_some<Halves>(from, count));
}
MOEFLUX_INLINE Floats load_part(const int8_t* from, int64_t count) {
  const Codes codes = load_some<Codes>(from, count);
  return load_row((const int8_t*)&codes);
}

}  // namespace moeflux::cpu::MOEFLUX_ISA
