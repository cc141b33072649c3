// Choosing a token: the values of logits to which something is done before they are weighed.
#pragma once

#include "kernels/cpu/choice_lanes.inl"

namespace moeflux::cpu::MOEFLUX_ISA {

// Values with the repetition penalty where the bit is 1. What is above 0 is divided as IEEE says, by two products where
// their sum is the same: a division takes as long as everything else that is done to a value.
template <bool divides>
MOEFLUX_INLINE Doubles penalized(uint32_t seen, Doubles value, const Penalties& penalties) {
  const Doubles by = splat(penalties.repetition);
#if defined(__AVX512F__)
  const auto all = static_cast<__mmask8>(seen);
  const auto from = (__m512d)value;
  const __mmask8 above = _mm512_mask_cmp_pd_mask(all, from, __m512d{}, _CMP_GT_OQ);
  if constexpr (divides)
    return (Doubles)_mm512_mask_div_pd(_mm512_mask_mul_pd(from, all, from, (__m512d)by), above, from, (__m512d)by);
  const __m512d factor = _mm512_mask_mov_pd((__m512d)by, above, _mm512_set1_pd(penalties.reciprocal));
  const __m512d rest = _mm512_maskz_mul_pd(above, from, _mm512_set1_pd(penalties.rounded_by));
  return (Doubles)_mm512_mask_fmadd_pd(from, all, factor, rest);
#else
  const Doubles quotient = divides ? value / by : fma(value, splat(penalties.reciprocal), value * penalties.rounded_by);
  return lanes_of(seen) ? (value > 0 ? quotient : value * by) : value;
#endif
}

MOEFLUX_INLINE Floats nearly_penalized(FloatLanes seen, Floats value, Floats by, Floats reciprocal) {
#if defined(__AVX512F__)
  const __m512 factor = (__m512)select(above(value, Floats{}), by, reciprocal);
  return (Floats)_mm512_mask_mul_ps((__m512)value, seen, (__m512)value, factor);
#else
  return select(seen, value, value * select(above(value, Floats{}), by, reciprocal));
#endif
}

// Of a bit set, those of a vector of Doubles and more.
MOEFLUX_INLINE uint32_t bits_at(const unsigned char* bytes, int64_t first) {
  return static_cast<uint32_t>(bytes[first / choice_lanes]) >> (first % choice_lanes);
}

template <bool any_seen, bool all_allowed, bool divides>
MOEFLUX_INLINE void penalize_all(const float* logits, const uint32_t* seen, const Penalties& penalties,
                                 const uint32_t* allowed, double* values) {
  const auto* const seen_bytes = reinterpret_cast<const unsigned char*>(seen);
  const auto* const allowed_bytes = reinterpret_cast<const unsigned char*>(allowed);
  const Penalties own = penalties;  // what no store can change
  for (int64_t first = 0; first < choice_block; first += wide) {
    Doubles value = load_values(logits + first);
    if constexpr (any_seen) value = penalized<divides>(bits_at(seen_bytes, first), value, own);
    if constexpr (!all_allowed)
      value = choose(bits_at(allowed_bytes, first), splat(static_cast<double>(minus_infinity)), value);
    store(values + first, value);
  }
}

template <bool any_seen, bool divides>
static void penalize_some(const float* logits, const uint32_t* seen, const Penalties& penalties,
                          const uint32_t* allowed, double* values) {
  if (allowed)
    penalize_all<any_seen, false, divides>(logits, seen, penalties, allowed, values);
  else
    penalize_all<any_seen, true, divides>(logits, seen, penalties, allowed, values);
}

static void penalize(const float* logits, const uint32_t* seen, const Penalties& penalties, const uint32_t* allowed,
                     double* values) {
  if (!seen)
    penalize_some<false, false>(logits, seen, penalties, allowed, values);
  else if (penalties.reciprocal > 0)
    penalize_some<true, false>(logits, seen, penalties, allowed, values);
  else
    penalize_some<true, true>(logits, seen, penalties, allowed, values);
}

template <bool divides>
MOEFLUX_INLINE void penalize_each(const float* logits, int64_t count, const Penalties& penalties, double* values) {
  const Penalties own = penalties;  // what no store can change
  for (int64_t i = 0; i < count; i += wide)
    store(values + i, penalized<divides>(~uint32_t{0}, load_values(logits + i), own));
}

static void penalize_packed(const float* logits, int64_t count, const Penalties& penalties, double* values) {
  if (penalties.reciprocal > 0)
    penalize_each<false>(logits, count, penalties, values);
  else
    penalize_each<true>(logits, count, penalties, values);
}

static double greatest_value(const double* values) {
  constexpr double beyond = -static_cast<double>(minus_infinity);
  constexpr int64_t vectors = 4;
  Doubles best[vectors];
  LongInts good = ~LongInts{};
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < vectors; ++i) best[i] = splat(-beyond);
  for (int64_t first = 0; first < choice_block; first += vectors * wide) {
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < vectors; ++i) {
      const Doubles some = load<Doubles>(values + first + i * wide);
      best[i] = some > best[i] ? some : best[i];
      good &= (LongInts)(some < beyond);
    }
  }
  double found = best[0][0];
  bool all = true;
  for (int64_t i = 0; i < wide; ++i) {
    for (const Doubles& each : best) found = each[i] > found ? each[i] : found;
    all &= good[i] != 0;
  }
  return all ? found : __builtin_nan("");
}

// A block's numbers in the places of tokens.
template <typename Number>
MOEFLUX_INLINE Doubles load_tokens(const Number* numbers, const int32_t* tokens) {
#if defined(__AVX512F__)
  const __m256i places = _mm256_loadu_si256((const __m256i*)tokens) & _mm256_set1_epi32(choice_block - 1);
  if constexpr (sizeof(Number) == sizeof(float))
    return (Doubles)_mm512_maskz_cvtps_pd(0xff, _mm256_i32gather_ps(numbers, places, 4));
  else
    return (Doubles)_mm512_mask_i32gather_pd(__m512d{}, 0xff, places, numbers, 8);
#else
  Doubles some;
  for (int64_t i = 0; i < wide; ++i) some[i] = numbers[tokens[i] & (choice_block - 1)];
  return some;
#endif
}

// Lanes of -1 or 0: which tokens, by their places or ids, have a bit in their block.
MOEFLUX_INLINE LongInts have_bits(const uint32_t* bits, const int32_t* tokens) {
#if defined(__AVX512F__)
  const __m256i places = _mm256_loadu_si256((const __m256i*)tokens) & _mm256_set1_epi32(choice_block - 1);
  const __m256i words = _mm256_i32gather_epi32((const int*)bits, _mm256_srli_epi32(places, 5), 4);
  const __m256i own = _mm256_sllv_epi32(_mm256_set1_epi32(1), places & _mm256_set1_epi32(31));
  return (LongInts)_mm512_movm_epi64(_mm256_test_epi32_mask(words, own));
#else
  LongInts some;
  for (int64_t i = 0; i < wide; ++i) {
    const auto place = static_cast<uint32_t>(tokens[i]) % static_cast<uint32_t>(choice_block);
    some[i] = -static_cast<int64_t>(bits[place / 32] >> (place % 32) & 1);
  }
  return some;
#endif
}

MOEFLUX_INLINE Doubles divided(Doubles value, const Penalties& penalties) {
  return value > 0 ? value / penalties.repetition : value * penalties.repetition;
}

static void penalize_listed(double* values, const int32_t* tokens, int64_t count, const uint32_t* seen,
                            const Penalties& penalties) {
  const Penalties own = penalties;  // what no store can change
  for (int64_t i = 0; i < count; i += wide) {
    const Doubles value = load<Doubles>(values + i);
    store(values + i, have_bits(seen, tokens + i) ? divided(value, own) : value);
  }
}

// As f32 numbers that are finite where the values are.
MOEFLUX_INLINE HalfFloats near_values(Doubles values) {
  constexpr double most = std::numeric_limits<float>::max();
  constexpr double beyond = -static_cast<double>(minus_infinity);
  const Doubles upto = values > most ? splat(most) : values;
  return halves_of(upto < -most ? (values > -beyond ? splat(-most) : splat(-beyond)) : upto);
}

constexpr int64_t sampled_rows = choice_rows / choice_samples;  // of so many, one is a sample

static ChoiceRange change(const float* logits, const ChangedPlaces& changed, const Penalties& penalties,
                          const uint32_t* allowed, double* values, int64_t row, float* tops, float* samples) {
  HalfFloats least = -minus_infinity - HalfFloats{};
  HalfFloats greatest = minus_infinity - HalfFloats{};
  HalfInts good = ~HalfInts{};
  for (int64_t first = 0; first < changed.count; first += wide) {
    Doubles value = load_tokens(logits, changed.places + first);
    if (changed.biases) value += load<Doubles>(changed.biases + first);
    const HalfInts times = load<HalfInts>(changed.times + first);
    const Doubles number = doubles_of(times & std::numeric_limits<int32_t>::max());
    value = longs_of(times) < 0 ? divided(value, penalties) : value;
    value -= number > 0 ? penalties.presence + penalties.frequency * number : Doubles{};
    if (allowed)
      value = have_bits(allowed, changed.places + first) ? value : splat(static_cast<double>(minus_infinity));
    store(values + first, value);
    const HalfFloats near = near_values(value);
    least = near < least ? near : least;
    greatest = near > greatest ? near : greatest;
    good &= near == near;
    const int64_t count = smaller(changed.count - first, wide);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t place = changed.places[first + i];
      float& top = tops[place % choice_columns];
      if (near[i] > top) top = near[i];
      const auto behind = static_cast<uint64_t>(place / choice_columns - row) % choice_rows;
      if (behind % sampled_rows == 0)
        samples[behind / sampled_rows * choice_columns + place % choice_columns] = near[i];
    }
  }
  for (int64_t i = changed.count; i % choice_lanes != 0; ++i) values[i] = static_cast<double>(minus_infinity);
  ChoiceRange range = {-minus_infinity, minus_infinity};
  for (int64_t i = 0; i < wide; ++i) {
    range.least = least[i] < range.least ? least[i] : range.least;
    range.greatest = greatest[i] > range.greatest ? greatest[i] : range.greatest;
    good[0] &= good[i];
  }
  if (good[0] == 0) range.greatest = __builtin_nanf("");
  return range;
}

}  // namespace moeflux::cpu::MOEFLUX_ISA
