// What the passes of choosing a token are written with: f64 numbers beside the f32 ones of simd.h.
#pragma once

#include <limits>

#include "kernels/cpu/choice.h"
#include "kernels/cpu/lanes.h"

namespace moeflux::cpu::MOEFLUX_ISA {

constexpr int64_t wide = lanes / 2;  // f64 in a register

typedef double Doubles __attribute__((vector_size(wide * 8)));
typedef uint64_t LongWords __attribute__((vector_size(wide * 8)));
typedef long long LongInts __attribute__((vector_size(wide * 8)));  // what comparing Doubles gives
typedef int32_t HalfInts __attribute__((vector_size(wide * 4)));
typedef float HalfFloats __attribute__((vector_size(wide * 4)));

constexpr int64_t parts = choice_lanes / wide;
constexpr int64_t choice_together = parts > 4 ? parts : 4;  // so many vectors are weighed together

MOEFLUX_INLINE Doubles splat(double value) { return value - Doubles{}; }

MOEFLUX_INLINE LongInts longs_of(HalfInts from) {
#if defined(__AVX512F__)
  return (LongInts)_mm512_maskz_cvtepi32_epi64(0xff, (__m256i)from);
#elif defined(__AVX2__)
  return (LongInts)_mm256_cvtepi32_epi64((__m128i)from);
#else
  return __builtin_convertvector(from, LongInts);
#endif
}

// a * b + c with one rounding.
MOEFLUX_INLINE Doubles fma(Doubles a, Doubles b, Doubles c) {
#if defined(__AVX512F__)
  return (Doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__AVX2__)
  return (Doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__ARM_NEON)
  return (Doubles)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
  for (int64_t i = 0; i < wide; ++i) c[i] = __builtin_fma(a[i], b[i], c[i]);
  return c;
#endif
}

#if !defined(__AVX512F__)
MOEFLUX_INLINE uint64_t bits_of(Ints mask) {
#if defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)mask));
#else
  uint64_t bits = 0;
  for (int64_t i = 0; i < lanes; ++i) bits |= static_cast<uint64_t>(mask[i] & 1) << i;
  return bits;
#endif
}
MOEFLUX_INLINE uint32_t bits_of(LongInts mask) {
#if defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_pd((__m256d)mask));
#else
  uint32_t bits = 0;
  for (int64_t i = 0; i < wide; ++i) bits |= static_cast<uint32_t>(mask[i] & 1) << i;
  return bits;
#endif
}
#endif

// One bit, or a lane of -1 or 0, for each number of a vector.
#if defined(__AVX512F__)
typedef __mmask8 Lanes;
typedef __mmask16 FloatLanes;
MOEFLUX_INLINE uint32_t bits_of(FloatLanes mask) { return mask; }
#else
typedef LongInts Lanes;
typedef Ints FloatLanes;
#endif

MOEFLUX_INLINE FloatLanes at_least(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#else
  return a >= b;
#endif
}
MOEFLUX_INLINE FloatLanes above(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#else
  return a > b;
#endif
}

// One bit a lane: which are at least, or above, a number.
MOEFLUX_INLINE uint64_t bits_of_least(Floats values, float least) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)values, _mm512_set1_ps(least), _CMP_GE_OQ);
#else
  return bits_of(values >= least);
#endif
}

MOEFLUX_INLINE uint64_t bits_above(Floats values, float most) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)values, _mm512_set1_ps(most), _CMP_GT_OQ);
#else
  return bits_of(values > most);
#endif
}

MOEFLUX_INLINE uint32_t bits_of_least(Doubles values, double least) {
#if defined(__AVX512F__)
  return _mm512_cmp_pd_mask((__m512d)values, _mm512_set1_pd(least), _CMP_GE_OQ);
#else
  return bits_of((LongInts)(values >= least));
#endif
}

MOEFLUX_INLINE uint32_t bits_above(Doubles values, double most) {
#if defined(__AVX512F__)
  return _mm512_cmp_pd_mask((__m512d)values, _mm512_set1_pd(most), _CMP_GT_OQ);
#else
  return bits_of((LongInts)(values > most));
#endif
}

MOEFLUX_INLINE uint64_t bits_upto(Words values, uint32_t most) {
#if defined(__AVX512F__)
  return _mm512_cmp_epu32_mask((__m512i)values, _mm512_set1_epi32(static_cast<int32_t>(most)), _MM_CMPINT_LE);
#else
  return bits_of((Ints)(values <= most));
#endif
}

// Of those with a bit.
MOEFLUX_INLINE uint64_t bits_within(uint64_t bits, Floats values, const ChoiceRange& range) {
#if defined(__AVX512F__)
  const auto least =
      _mm512_mask_cmp_ps_mask(static_cast<__mmask16>(bits), (__m512)values, _mm512_set1_ps(range.least), _CMP_GE_OQ);
  return _mm512_mask_cmp_ps_mask(least, (__m512)values, _mm512_set1_ps(range.greatest), _CMP_LE_OQ);
#else
  return bits & bits_of((values >= range.least) & (values <= range.greatest));
#endif
}

// The f32 next to a number, at or above it.
static float round_up(double number) {
  constexpr float most = std::numeric_limits<float>::max();
  if (number == minus_infinity || number > most) return number > most ? -minus_infinity : minus_infinity;
  if (number < -most) return -most;
  const auto rounded = static_cast<float>(number);
  return rounded < number ? __builtin_nextafterf(rounded, -minus_infinity) : rounded;
}

// The f32 numbers in a bracket.
MOEFLUX_INLINE ChoiceRange floats_within(const ChoiceBracket& bracket) {
  return {round_up(bracket.least), -round_up(-bracket.most)};
}

#if !defined(__AVX512F__)
// Lanes of -1 or 0: those of the lowest bits.
MOEFLUX_INLINE Ints float_lanes_of(uint32_t bits) {
  Words own;
  for (int64_t i = 0; i < lanes; ++i) own[i] = 1u << i;
  return ((bits - Words{}) & own) != 0;
}
MOEFLUX_INLINE LongInts lanes_of(uint32_t bits) {
  LongInts own;
  for (int64_t i = 0; i < wide; ++i) own[i] = int64_t{1} << i;
  return ((static_cast<int64_t>(bits) - LongInts{}) & own) != 0;
}
#endif

// Lanes of the lowest bits; and of those that a vector of Floats has in a block's bit set.
MOEFLUX_INLINE FloatLanes floats_of(uint32_t bits) {
#if defined(__AVX512F__)
  return static_cast<FloatLanes>(bits);
#else
  return float_lanes_of(bits);
#endif
}
MOEFLUX_INLINE FloatLanes floats_at(const uint32_t* bits, int64_t first) {
#if defined(__AVX512F__)
  return load<FloatLanes>(reinterpret_cast<const unsigned char*>(bits) + first / 8);
#else
  return floats_of(bits[first / 32] >> (first % 32));
#endif
}

// b in the lanes of the mask, else a.
MOEFLUX_INLINE Floats select(FloatLanes mask, Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_mask_mov_ps((__m512)a, mask, (__m512)b);
#else
  return mask ? b : a;
#endif
}
MOEFLUX_INLINE Doubles select(Lanes mask, Doubles a, Doubles b) {
#if defined(__AVX512F__)
  return (Doubles)_mm512_mask_mov_pd((__m512d)a, mask, (__m512d)b);
#else
  return mask ? b : a;
#endif
}

// Of a vector of a block's logits.
template <bool any_penalized>
struct Marks {
  FloatLanes values;  // those that are values, with a penalty or without
  FloatLanes penalized;

  [[gnu::always_inline]] static Marks at(const MarkedLogits& marked, int64_t first) {
    const FloatLanes plain = floats_at(marked.plain, first);
    if constexpr (!any_penalized) return {plain, FloatLanes{}};
    const FloatLanes penalized = floats_at(marked.penalized, first);
    return {static_cast<FloatLanes>(plain | penalized), penalized};
  }
};

// One bound of both kinds of logits.
struct FloatBound {
  Floats plain;
  Floats penalized;

  template <bool any_penalized>
  [[gnu::always_inline]] Floats of(const Marks<any_penalized>& marks) const {
    return any_penalized ? select(marks.penalized, plain, penalized) : plain;
  }
};
struct FloatBounds {
  FloatBound least;
  FloatBound most;
};
static FloatBounds float_bounds(const MarkedBounds& bounds) {
  const ChoiceRange plain = floats_within(bounds.plain.within);
  const ChoiceRange penalized = floats_within(bounds.penalized.within);
  return {{splat(plain.least), splat(penalized.least)}, {splat(plain.greatest), splat(penalized.greatest)}};
}

// b where the bit is 1, from the lowest on, else a.
MOEFLUX_INLINE Floats choose(uint32_t bits, Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_mask_mov_ps((__m512)a, static_cast<__mmask16>(bits), (__m512)b);
#else
  return float_lanes_of(bits) ? b : a;
#endif
}
MOEFLUX_INLINE Doubles choose(uint32_t bits, Doubles a, Doubles b) {
#if defined(__AVX512F__)
  return (Doubles)_mm512_mask_mov_pd((__m512d)a, static_cast<__mmask8>(bits), (__m512d)b);
#else
  return lanes_of(bits) ? b : a;
#endif
}

// Those with a bit, from the lowest on, one behind the other; what follows them in a vector is overwritten.
#if defined(__AVX512F__)
MOEFLUX_INLINE void store_packed(void* to, Floats values, uint32_t bits) {
  store(to, _mm512_maskz_compress_ps(static_cast<__mmask16>(bits), (__m512)values));
}
#elif defined(__AVX2__)
// The places of the bits of a byte, a byte for each.
struct PlacesOfBits {
  uint64_t of[256] = {};

  constexpr PlacesOfBits() {
    for (unsigned byte = 0; byte < 256; ++byte)
      for (unsigned bit = 8; bit-- > 0;)
        if ((byte >> bit & 1) != 0) of[byte] = of[byte] << 8 | bit;
  }
};

constexpr PlacesOfBits places_of_bits;

MOEFLUX_INLINE void store_packed(void* to, Floats values, uint32_t bits) {
  const __m256i places = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(places_of_bits.of + (bits & 0xff))));
  store(to, _mm256_permutevar8x32_ps((__m256)values, places));
}
#else
MOEFLUX_INLINE void store_packed(void* to, Floats values, uint32_t bits) {
  auto* at = static_cast<char*>(to);
  for (int64_t i = 0; i < lanes; ++i) {
    const float value = values[i];
    __builtin_memcpy(at, &value, sizeof value);
    at += sizeof value * (bits >> i & 1);
  }
}
#endif

MOEFLUX_INLINE Doubles load_values(const double* from) { return load<Doubles>(from); }
// Written out where GCC takes __builtin_convertvector to pieces.
MOEFLUX_INLINE Doubles load_values(const float* from) {
#if defined(__AVX512F__)
  return (Doubles)_mm512_maskz_cvtps_pd(0xff, _mm256_loadu_ps(from));
#elif defined(__AVX2__)
  return (Doubles)_mm256_cvtps_pd(_mm_loadu_ps(from));
#else
  return __builtin_convertvector(load<HalfFloats>(from), Doubles);
#endif
}

MOEFLUX_INLINE HalfFloats halves_of(Doubles from) {
#if defined(__AVX512F__)
  return (HalfFloats)_mm512_maskz_cvtpd_ps(0xff, (__m512d)from);
#elif defined(__AVX2__)
  return (HalfFloats)_mm256_cvtpd_ps((__m256d)from);
#else
  return __builtin_convertvector(from, HalfFloats);
#endif
}

MOEFLUX_INLINE Doubles doubles_of(HalfInts from) {
#if defined(__AVX512F__)
  return (Doubles)_mm512_maskz_cvtepi32_pd(0xff, (__m256i)from);
#elif defined(__AVX2__)
  return (Doubles)_mm256_cvtepi32_pd((__m128i)from);
#else
  return __builtin_convertvector(from, Doubles);
#endif
}

// The parts of a sum, neighbours far apart first.
MOEFLUX_INLINE double total(const Doubles (&sums)[parts]) {
  double part[choice_lanes];
  __builtin_memcpy(part, sums, sizeof part);
  for (int64_t step = choice_lanes / 2; step > 0; step /= 2)
    for (int64_t i = 0; i < step; ++i) part[i] += part[i + step];
  return part[0];
}

}  // namespace moeflux::cpu::MOEFLUX_ISA
