// The vector type that kernels are written with: as many f32 as the instruction set has in a register.
//
// The translation unit of each instruction set includes this file, with the flags of that set and with MOEFLUX_ISA
// defined as its name. Everything is in a namespace of that name and stays inside the unit. An inline function that
// units with different flags share by name could run on machines that lack the instructions.
#pragma once

#ifndef MOEFLUX_ISA
#error "simd.h is for the translation units of the instruction sets"
#endif

#include <cstddef>
#include <cstdint>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define MOEFLUX_INLINE [[gnu::always_inline]] static inline

// Stands before a short loop over an array of vectors. Without unrolling, the array would be kept in memory.
#if defined(__clang__)
#define MOEFLUX_UNROLL _Pragma("unroll")
#else
#define MOEFLUX_UNROLL _Pragma("GCC unroll 16")
#endif

namespace moeflux::cpu::MOEFLUX_ISA {

#if defined(__AVX512F__)
constexpr int64_t lanes = 16;
#elif defined(__AVX2__)
constexpr int64_t lanes = 8;
#else
constexpr int64_t lanes = 4;
#endif

typedef float Floats __attribute__((vector_size(lanes * 4)));
typedef int32_t Ints __attribute__((vector_size(lanes * 4)));
typedef uint32_t Words __attribute__((vector_size(lanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(lanes * 2)));

#if defined(__AVX512F__)
// The unmasked forms of some intrinsics make GCC 12 warn of an uninitialised value.
constexpr __mmask16 all_lanes = 0xffff;
#endif

template <typename Vector>
MOEFLUX_INLINE Vector load(const void* from) {
  Vector value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

template <typename Vector>
MOEFLUX_INLINE void store(void* to, Vector value) {
  __builtin_memcpy(to, &value, sizeof value);
}

MOEFLUX_INLINE Floats splat(float value) { return value - Floats{}; }

// a * b + c: one rounding where the instruction set has it, two elsewhere.
MOEFLUX_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

MOEFLUX_INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }

template <bool add, typename Vector>
MOEFLUX_INLINE Vector merge(Vector a, Vector b) {
  if constexpr (add)
    return a + b;
  else
    return a > b ? a : b;
}

// Merges the upper half of the lanes with the lower half until one lane is left.
template <bool add>
MOEFLUX_INLINE float reduce(Floats value) {
  typedef float Four __attribute__((vector_size(16)));
#if defined(__AVX512F__)
  typedef float Eight __attribute__((vector_size(32)));
  const Eight eight = merge<add, Eight>(__builtin_shufflevector(value, value, 0, 1, 2, 3, 4, 5, 6, 7),
                                        __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15));
#elif defined(__AVX2__)
  const Floats eight = value;
#endif
#if defined(__AVX2__)
  const Four four = merge<add, Four>(__builtin_shufflevector(eight, eight, 0, 1, 2, 3),
                                     __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
#else
  const Four four = value;
#endif
  const Four two = merge<add, Four>(four, __builtin_shufflevector(four, four, 2, 3, 0, 1));
  const Four one = merge<add, Four>(two, __builtin_shufflevector(two, two, 1, 0, 3, 2));
  return one[0];
}

MOEFLUX_INLINE float sum(Floats value) { return reduce<true>(value); }
MOEFLUX_INLINE float largest(Floats value) { return reduce<false>(value); }

// ---- Parts of a vector: what is left at the end of a row -----------------------------------------------------------

// `count` < lanes elements, then zeros.
template <typename Vector>
MOEFLUX_INLINE Vector load_some(const void* from, int64_t count) {
  Vector value{};
  __builtin_memcpy(&value, from, static_cast<size_t>(count) * (sizeof value / lanes));
  return value;
}

template <typename Vector>
MOEFLUX_INLINE void store_some(void* to, Vector value, int64_t count) {
  __builtin_memcpy(to, &value, static_cast<size_t>(count) * (sizeof value / lanes));
}

// ---- Narrow integers -----------------------------------------------------------------------------------------------
// Written out where GCC takes __builtin_convertvector to pieces.

MOEFLUX_INLINE Words widen(Halves value) {
#if defined(__AVX512F__)
  return (Words)_mm512_maskz_cvtepu16_epi32(all_lanes, (__m256i)value);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)value);
#else
  return __builtin_convertvector(value, Words);
#endif
}

// The numbers must be below 2^16.
MOEFLUX_INLINE Halves narrow(Words value) {
#if defined(__AVX512F__)
  return (Halves)_mm512_maskz_cvtepi32_epi16(all_lanes, (__m512i)value);
#else
  return __builtin_convertvector(value, Halves);
#endif
}

// One byte for each lane.
MOEFLUX_INLINE Ints load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_maskz_cvtepu8_epi32(all_lanes, _mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadu_si64(from));
#else
  typedef uint8_t Sixteen __attribute__((vector_size(16)));
  typedef uint16_t Eight __attribute__((vector_size(16)));
  const Words word = {load<uint32_t>(from), 0, 0, 0};
  const Sixteen bytes = (Sixteen)word;
  const Eight halves =
      (Eight)__builtin_shufflevector(bytes, Sixteen{}, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  return (Ints)__builtin_shufflevector(halves, Eight{}, 0, 8, 1, 9, 2, 10, 3, 11);
#endif
}

typedef int8_t Codes __attribute__((vector_size(lanes)));

// One signed byte for each lane.
MOEFLUX_INLINE Ints load_codes(const int8_t* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_maskz_cvtepi8_epi32(all_lanes, _mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadu_si64(from));
#else
  return (load_bytes((const uint8_t*)from) ^ 0x80) - 0x80;
#endif
}

// The lowest byte of each lane.
MOEFLUX_INLINE Codes narrow_codes(Ints value) {
#if defined(__AVX512F__)
  return (Codes)_mm512_maskz_cvtepi32_epi8(all_lanes, (__m512i)value);
#else
  return __builtin_convertvector(value, Codes);
#endif
}

// ---- 16-bit floats -------------------------------------------------------------------------------------------------

MOEFLUX_INLINE Floats from_bf16(Halves value) { return (Floats)(widen(value) << 16); }
MOEFLUX_INLINE Floats load_bf16(const void* from) { return from_bf16(load<Halves>(from)); }

// The nearest bf16, ties to even. A NaN stays one.
MOEFLUX_INLINE Halves to_bf16(Floats value) {
  const Words bits = (Words)value;
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Words quiet = (bits >> 16) | 0x40u;
  return narrow((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

MOEFLUX_INLINE void store_bf16(void* to, Floats value) { store(to, to_bf16(value)); }

MOEFLUX_INLINE Floats from_f16(Halves value) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_cvtph_ps(all_lanes, (__m256i)value);
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps((__m128i)value);
#else
  const Words half = widen(value);
  const Words sign = (half & 0x8000u) << 16;
  const Words magnitude = half & 0x7fffu;
  const Words normal = (magnitude << 13) + 0x38000000u;  // the exponent's bias goes from 15 to 127
  const Words infinite = (magnitude << 13) | 0x7f800000u;
  const Words small = (Words)(__builtin_convertvector((Ints)magnitude, Floats) * 0x1p-24f);
  const Words finite = magnitude < 0x400u ? small : normal;
  return (Floats)(sign | (magnitude >= 0x7c00u ? infinite : finite));
#endif
}

// ---- Functions -----------------------------------------------------------------------------------------------------

// e^x within 2 units of the last place where that is a normal number; 0 below, infinity above, NaN for NaN.
MOEFLUX_INLINE Floats exp(Floats x) {
  x = x > 89.0f ? splat(89.0f) : x;
  x = x < -104.0f ? splat(-104.0f) : x;
  // x = n ln 2 + rest. Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
  const Floats shifted = x * 0x1.715476p+0f + 0x1.8p+23f;
  const Floats n = shifted - 0x1.8p+23f;
  // ln 2 in two parts, the first short enough for n times it to be exact.
  const Floats rest = fma(n, splat(0x1.bd0106p-13f), fma(n, splat(-0x1.63p-1f), x));
  Floats power = splat(0x1.6d4926p-10f);
  power = fma(power, rest, splat(0x1.121072p-7f));
  power = fma(power, rest, splat(0x1.5554e4p-5f));
  power = fma(power, rest, splat(0x1.5554d8p-3f));
  power = fma(power, rest, splat(0.5f));
  power = fma(power * rest, rest, rest) + 1.0f;
  // 2^n in two factors, because one would leave the range at both ends.
  const Ints exponent = (Ints)shifted - 0x4b400000;
  const Ints half = exponent >> 1;
  const Floats first = (Floats)((half + 127) << 23);
  const Floats second = (Floats)((exponent - half + 127) << 23);
  return power * first * second;
}

MOEFLUX_INLINE Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(-x)); }
MOEFLUX_INLINE Floats silu(Floats x) { return x / (1.0f + exp(-x)); }

}  // namespace moeflux::cpu::MOEFLUX_ISA
