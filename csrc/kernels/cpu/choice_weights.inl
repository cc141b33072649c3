// Choosing a token: weights and their sums.
#pragma once

#include "kernels/cpu/choice_lanes.inl"

namespace moeflux::cpu::MOEFLUX_ISA {

// 2^(k / 8), less k eighths of what the exponent counts: adding those of any whole number of eighths makes its power.
constexpr uint64_t powers_of_2[] = {
    0x3ff0000000000000, 0x3fef72b83c7d517b, 0x3fef06fe0a31b715, 0x3feebfdad5362a27,
    0x3feea09e667f3bcd, 0x3feeace5422aa0db, 0x3feee89f995ad3ad, 0x3fef5818dcfba487,
};

#if defined(__AVX512F__)
MOEFLUX_INLINE LongWords look_up_power(LongWords eighths) {
  return (LongWords)_mm512_maskz_permutexvar_epi64(0xff, (__m512i)eighths, _mm512_loadu_si512(powers_of_2));
}
#elif defined(__AVX2__)
struct PowerHalves {
  alignas(32) uint32_t low[8] = {};
  alignas(32) uint32_t high[8] = {};

  constexpr PowerHalves() {
    for (int i = 0; i < 8; ++i) {
      low[i] = static_cast<uint32_t>(powers_of_2[i]);
      high[i] = static_cast<uint32_t>(powers_of_2[i] >> 32);
    }
  }
};

constexpr PowerHalves power_halves;

MOEFLUX_INLINE LongWords look_up_power(LongWords eighths) {
  const __m256i place = _mm256_shuffle_epi32((__m256i)eighths, 0xa0);
  const __m256i low = _mm256_permutevar8x32_epi32(load<__m256i>(power_halves.low), place);
  const __m256i high = _mm256_permutevar8x32_epi32(load<__m256i>(power_halves.high), place);
  return (LongWords)_mm256_blend_epi32(low, high, 0xaa);
}
#else
MOEFLUX_INLINE LongWords look_up_power(LongWords eighths) {
  LongWords power;
  for (int64_t i = 0; i < wide; ++i) power[i] = powers_of_2[eighths[i] & 7];
  return power;
}
#endif

// Of the whole number of eighths that the lowest bits of each lane are.
MOEFLUX_INLINE Doubles power_of_2(LongWords eighths) { return (Doubles)(look_up_power(eighths) + (eighths << 49)); }

// 2^x for |x| at most a sixteenth. The last coefficient is 1, and so is 2^0.
template <bool rough>
MOEFLUX_INLINE void small_powers_of_2(Doubles* x, int64_t vectors) {
  constexpr double exact_terms[] = {
      0x1.ff669e79a21afp-17, 0x1.430e80e7265a8p-13, 0x1.5d8800061465dp-10, 0x1.3b2ab6eeb19fep-7,
      0x1.c6b08d70430f8p-5,  0x1.ebfbdff82c7cap-3,  0x1.62e42fefa39f0p-1,  1.0,
  };
  constexpr double rough_terms[] = {
      0x1.3b26b9696825cp-7, 0x1.c6be27da0faddp-5, 0x1.ebfbe06a27846p-3, 0x1.62e42fb9b538dp-1, 1.0,
  };
  const double* terms = rough ? rough_terms : exact_terms;
  constexpr int64_t count = rough ? 5 : 8;
  Doubles sums[choice_together];
  MOEFLUX_UNROLL
  for (int64_t v = 0; v < vectors; ++v) sums[v] = splat(terms[0]);
  MOEFLUX_UNROLL
  for (int64_t i = 1; i < count; ++i) {
    MOEFLUX_UNROLL
    for (int64_t v = 0; v < vectors; ++v) sums[v] = fma(sums[v], x[v], splat(terms[i]));
  }
  MOEFLUX_UNROLL
  for (int64_t v = 0; v < vectors; ++v) x[v] = sums[v];
}

#if defined(__AVX512F__)
MOEFLUX_INLINE Lanes at_least(HalfFloats a, float b) {
  return _mm256_cmp_ps_mask((__m256)a, _mm256_set1_ps(b), _CMP_GE_OQ);
}
MOEFLUX_INLINE Lanes at_most(Lanes mask, HalfFloats a, float b) {
  return _mm256_mask_cmp_ps_mask(mask, (__m256)a, _mm256_set1_ps(b), _CMP_LE_OQ);
}
MOEFLUX_INLINE Lanes at_least(Doubles a, double b) {
  return _mm512_cmp_pd_mask((__m512d)a, _mm512_set1_pd(b), _CMP_GE_OQ);
}
MOEFLUX_INLINE Lanes at_most(Lanes mask, Doubles a, double b) {
  return _mm512_mask_cmp_pd_mask(mask, (__m512d)a, _mm512_set1_pd(b), _CMP_LE_OQ);
}
MOEFLUX_INLINE uint32_t bits_of(Lanes mask) { return mask; }
constexpr Lanes all_of_them = 0xff;
#else
constexpr Lanes all_of_them = LongInts{} == LongInts{};
MOEFLUX_INLINE Lanes at_least(Doubles a, double b) { return a >= b; }
MOEFLUX_INLINE Lanes at_most(Lanes, Doubles a, double b) { return a <= b; }
#endif

// 0 in the lanes that are not of the mask. AVX-512 masks what is done next instead.
template <bool every>
MOEFLUX_INLINE Doubles only([[maybe_unused]] Lanes mask, Doubles a) {
#if defined(__AVX512F__)
  return a;
#else
  return every ? a : (Doubles)((LongInts)a & mask);
#endif
}

// What a sum becomes when a * b is added with one rounding, in the lanes of a mask; elsewhere b is 0 without AVX-512.
template <bool every>
MOEFLUX_INLINE Doubles add_product([[maybe_unused]] Lanes mask, Doubles sum, Doubles a, Doubles b) {
#if defined(__AVX512F__)
  if constexpr (!every) return (Doubles)_mm512_mask3_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)sum, mask);
#endif
  return fma(a, b, sum);
}
// And in those of them alone that are above a bracket.
MOEFLUX_INLINE Doubles add_above([[maybe_unused]] Lanes mask, Lanes upto, Doubles sum, Doubles a, Doubles b) {
#if defined(__AVX512F__)
  return (Doubles)_mm512_mask3_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)sum, mask & ~upto);
#else
  return fma(a, (Doubles)((LongInts)b & ~upto), sum);
#endif
}

// Logits are compared as f32 numbers: half as wide vectors with AVX-512, or where a vector has twice as many of them,
// but only for which lie in a bracket.
#if defined(__AVX512F__)
template <typename Number>
constexpr bool by_halves = sizeof(Number) == sizeof(float);
template <typename Number>
constexpr bool by_floats = false;
#else
template <typename Number>
constexpr bool by_halves = false;
template <typename Number>
constexpr bool by_floats = sizeof(Number) == sizeof(float);
#endif

// The f32 numbers from which on values are kept, and those in a bracket.
struct WeighedFloats {
  float from;
  ChoiceRange within;
};

struct ChoiceLanes {
  Doubles all[parts] = {};
  Doubles above[parts] = {};
};

// Vectors that are weighed together: their values, each times its factor. Then a weight is the rest times the power.
template <int64_t vectors>
struct Together {
  Doubles rest[vectors];
  Doubles factors[vectors];
  Lanes kept[vectors];  // those that weigh something
  Doubles power[vectors];
};

// Each operation of all of them before the next. Operations on one vector wait for each other, and a processor looks
// only so far ahead for others.
template <bool rough, bool every, int64_t vectors>
MOEFLUX_INLINE void make_weights(Together<vectors>& all, const ChoiceScale& scale) {
  // Adding 1.5 * 2^49 rounds to a whole number of eighths and leaves it in the low bits.
  const Doubles rounding = splat(rough ? 0x1.8p+49 - scale.origin : 0x1.8p+49);
  if constexpr (!rough) {
    MOEFLUX_UNROLL
    for (int64_t v = 0; v < vectors; ++v) all.rest[v] -= scale.greatest;
  }
  MOEFLUX_UNROLL
  for (int64_t v = 0; v < vectors; ++v) all.power[v] = fma(all.rest[v], all.factors[v], rounding);
  MOEFLUX_UNROLL
  for (int64_t v = 0; v < vectors; ++v)
    all.rest[v] = only<every>(all.kept[v], fma(all.rest[v], all.factors[v], rounding - all.power[v]));
  MOEFLUX_UNROLL
  for (int64_t v = 0; v < vectors; ++v) all.power[v] = power_of_2((LongWords)all.power[v]);
  small_powers_of_2<rough>(all.rest, vectors);
}

template <bool rough, bool split, bool stored, bool every, int64_t vectors, typename Number>
MOEFLUX_INLINE void weigh_together(const Number* values, const ChoiceScale& scale, const ChoiceBracket& bracket,
                                   [[maybe_unused]] const WeighedFloats& floats, ChoiceLanes& sums, double* weights,
                                   unsigned char* bits) {
  Together<vectors> all;
  Lanes upto[vectors];
  Lanes found[vectors];
  MOEFLUX_UNROLL
  for (int64_t v = 0; v < vectors; ++v) {
    all.factors[v] = splat(scale.factor);
    const auto look = [&](auto value, auto from, auto least, auto most) __attribute__((always_inline)) {
      all.kept[v] = every ? all_of_them : at_least(value, from);
      if constexpr (split) upto[v] = at_most(all.kept[v], value, most);
      if constexpr (split && !by_floats<Number>) found[v] = all.kept[v] & upto[v] & at_least(value, least);
    };
    all.rest[v] = load_values(values + v * wide);
    if constexpr (by_halves<Number>)
      look(load<HalfFloats>(values + v * wide), floats.from, floats.within.least, floats.within.greatest);
    else
      look(all.rest[v], scale.least, bracket.least, bracket.most);
  }
  make_weights<rough, every>(all, scale);
  MOEFLUX_UNROLL
  for (int64_t v = 0; v < vectors; ++v) {
    const Lanes kept = all.kept[v];
    const Doubles rest = all.rest[v];
    const Doubles power = only<every>(kept, all.power[v]);
    Doubles& sum = sums.all[v % parts];
    Doubles& above = sums.above[v % parts];
    if constexpr (stored) store(weights + v * wide, add_product<every>(kept, Doubles{}, rest, power));
    sum = add_product<every>(kept, sum, rest, power);
    if constexpr (split) above = add_above(kept, upto[v], above, rest, power);
  }
  if constexpr (split && by_floats<Number>) {
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < vectors * wide; i += choice_lanes) {
      uint64_t byte = 0;
      MOEFLUX_UNROLL
      for (int64_t lane = 0; lane < choice_lanes; lane += lanes) {
        const Floats some = load<Floats>(values + i + lane);
        byte |= (bits_of_least(some, floats.within.least) & ~bits_above(some, floats.within.greatest)) << lane;
      }
      bits[i / choice_lanes] = static_cast<unsigned char>(byte);
    }
  } else if constexpr (split) {
    MOEFLUX_UNROLL
    for (int64_t v = 0; v < vectors; v += parts) {
      uint32_t byte = 0;
      MOEFLUX_UNROLL
      for (int64_t part = 0; part < parts; ++part) byte |= bits_of(found[v + part]) << (part * wide);
      // Stored byte by byte: GCC would make words of them, for which it moves the masks to other registers.
      *const_cast<volatile unsigned char*>(bits + v / parts) = static_cast<unsigned char>(byte);
    }
  }
}

template <bool rough, bool split, bool stored, bool every, bool brings = false, typename Number>
MOEFLUX_INLINE ChoiceSums weigh_all(const Number* values, int64_t count, const ChoiceScale& asked,
                                    const ChoiceBracket& within, double* weights, uint64_t* bits,
                                    [[maybe_unused]] const float* next = nullptr) {
  ChoiceScale scale = asked;  // what no store can change
  if (every) scale.least = std::numeric_limits<double>::lowest();
  const ChoiceBracket bracket = within;
  WeighedFloats floats = {};
  if constexpr (by_halves<Number>) floats.from = round_up(scale.least);
  if constexpr (split && (by_halves<Number> || by_floats<Number>))
    floats.within = floats_within({within.least > asked.least ? within.least : asked.least, within.most});
  auto* const bytes = reinterpret_cast<unsigned char*>(bits);
  ChoiceLanes sums;
  int64_t i = 0;
  const auto weights_at = [&] { return stored ? weights + i : nullptr; };
  const auto bytes_at = [&] { return split ? bytes + i / choice_lanes : nullptr; };
  constexpr int64_t last = every ? 1 : 0;  // at least so many are looked at more closely: there may be -inf
  for (; i + choice_together * wide + last <= count; i += choice_together * wide) {
    if constexpr (brings) {
      MOEFLUX_UNROLL
      for (int64_t line = 0; line < choice_together * wide; line += choice_columns) __builtin_prefetch(next + i + line);
    }
    weigh_together<rough, split, stored, every, choice_together>(values + i, scale, bracket, floats, sums, weights_at(),
                                                                 bytes_at());
  }
  for (; i < count; i += choice_lanes)
    weigh_together<rough, split, stored, false, parts>(values + i, scale, bracket, floats, sums, weights_at(),
                                                       bytes_at());
  return {total(sums.all), split ? total(sums.above) : 0};
}

template <bool rough, typename Number>
static ChoiceSums weigh(const Number* values, int64_t count, const ChoiceScale& scale, const ChoiceBracket& bracket,
                        double* weights, uint64_t* bits) {
  const bool every = rough && scale.least == static_cast<double>(minus_infinity);
  if (weights) return weigh_all<rough, false, true, false>(values, count, scale, bracket, weights, bits);
  if (every && bits) return weigh_all<rough, true, false, rough>(values, count, scale, bracket, weights, bits);
  if (every) return weigh_all<rough, false, false, rough>(values, count, scale, bracket, weights, bits);
  return bits ? weigh_all<rough, true, false, false>(values, count, scale, bracket, weights, bits)
              : weigh_all<rough, false, false, false>(values, count, scale, bracket, weights, bits);
}

static double weigh_block_roughly(const float* logits, const ChoiceScale& scale, const float* next) {
  return (scale.least == static_cast<double>(minus_infinity)
              ? weigh_all<true, false, false, true, true>(logits, choice_block, scale, {}, nullptr, nullptr, next)
              : weigh_all<true, false, false, false, true>(logits, choice_block, scale, {}, nullptr, nullptr, next))
      .all;
}

}  // namespace moeflux::cpu::MOEFLUX_ISA
