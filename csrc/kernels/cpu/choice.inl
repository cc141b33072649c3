// Choosing a token: passes over a block, each number in the lane of its place modulo `choice_lanes`.

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

MOEFLUX_INLINE Doubles splat(double value) { return value - Doubles{}; }

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

MOEFLUX_INLINE uint32_t bits_within(Doubles values, const ChoiceBracket& bracket) {
#if defined(__AVX512F__)
  const __mmask8 at_most = _mm512_cmp_pd_mask((__m512d)values, _mm512_set1_pd(bracket.most), _CMP_LE_OQ);
  return _mm512_mask_cmp_pd_mask(at_most, (__m512d)values, _mm512_set1_pd(bracket.least), _CMP_GE_OQ);
#else
  return bits_of((LongInts)(values >= bracket.least) & (LongInts)(values <= bracket.most));
#endif
}

MOEFLUX_INLINE Doubles add_above(Doubles sum, Doubles weight, Doubles value, double most) {
#if defined(__AVX512F__)
  const __mmask8 at_most = _mm512_cmp_pd_mask((__m512d)value, _mm512_set1_pd(most), _CMP_LE_OQ);
  return (Doubles)_mm512_mask_add_pd((__m512d)sum, at_most, (__m512d)sum, (__m512d)weight);
#else
  return value <= most ? sum + weight : sum;
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

// -inf where the bit is 0, from the lowest on.
MOEFLUX_INLINE Floats load_where(const float* from, uint32_t bits) {
#if defined(__AVX512F__)
  return (Floats)_mm512_mask_loadu_ps(_mm512_set1_ps(minus_infinity), static_cast<__mmask16>(bits), from);
#else
  Words own;
  for (int64_t i = 0; i < lanes; ++i) own[i] = 1u << i;
  return ((bits - Words{}) & own) != 0 ? load<Floats>(from) : splat(minus_infinity);
#endif
}

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

MOEFLUX_INLINE Doubles doubles_of(HalfInts from) {
#if defined(__AVX512F__)
  return (Doubles)_mm512_maskz_cvtepi32_pd(0xff, (__m256i)from);
#elif defined(__AVX2__)
  return (Doubles)_mm256_cvtepi32_pd((__m128i)from);
#else
  return __builtin_convertvector(from, Doubles);
#endif
}
MOEFLUX_INLINE LongInts longs_of(HalfInts from) {
#if defined(__AVX512F__)
  return (LongInts)_mm512_maskz_cvtepi32_epi64(0xff, (__m256i)from);
#elif defined(__AVX2__)
  return (LongInts)_mm256_cvtepi32_epi64((__m128i)from);
#else
  return __builtin_convertvector(from, LongInts);
#endif
}

// Lanes of -1 or 0: those of the lowest bits.
MOEFLUX_INLINE LongInts lanes_of(uint32_t bits) {
  LongInts own;
  for (int64_t i = 0; i < wide; ++i) own[i] = int64_t{1} << i;
  return ((static_cast<int64_t>(bits) - LongInts{}) & own) != 0;
}

// The parts of a sum, neighbours far apart first.
MOEFLUX_INLINE double total(const Doubles (&sums)[parts]) {
  double part[choice_lanes];
  __builtin_memcpy(part, sums, sizeof part);
  for (int64_t step = choice_lanes / 2; step > 0; step /= 2)
    for (int64_t i = 0; i < step; ++i) part[i] += part[i + step];
  return part[0];
}

// ---- Comparing ------------------------------------------------------------------------------------------------------

static float greatest(const float* logits, const float* next, int64_t row, float* tops, float* samples) {
  constexpr int64_t vectors = choice_columns / lanes;
  Floats best[vectors];
  Ints bad = {};
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < vectors; ++i) best[i] = splat(minus_infinity);
  for (int64_t first = 0; first < choice_block; first += choice_columns) {
    __builtin_prefetch(next + first);
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < vectors; ++i) {
      const Floats some = load<Floats>(logits + first + i * lanes);
      best[i] = max(some, best[i]);
      bad |= ~(some < -minus_infinity);
    }
  }
  __builtin_memcpy(tops, best, sizeof best);
  float found = tops[0];
  for (int64_t i = 1; i < choice_columns; ++i) found = tops[i] > found ? tops[i] : found;
  for (int64_t sample = 0; sample < choice_samples; ++sample, row += choice_rows / choice_samples) {
    const float* elements = logits + row % choice_rows * choice_columns;
    const float* others = logits + (row + 1) % choice_rows * choice_columns;
    for (int64_t i = 0; i < choice_columns; ++i)
      samples[sample * choice_columns + i] = elements[i] == tops[i] ? others[i] : elements[i];
  }
  bool any = false;
  for (int64_t i = 0; i < lanes; ++i) any |= bad[i] != 0;
  return any ? __builtin_nanf("") : found;
}

static int64_t find(const float* logits, float least, float most, uint64_t* bits) {
  int64_t count = 0;
  for (int64_t word = 0; word < choice_long_words; ++word) {
    uint64_t found = 0;
    uint64_t above = 0;
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < 64; i += lanes) {
      const Floats some = load<Floats>(logits + 64 * word + i);
      found |= bits_of_least(some, least) << i;
      above |= bits_above(some, most) << i;
    }
    bits[word] = found & ~above;
    count += __builtin_popcountll(above);
  }
  return count;
}

// The bits of eight are a byte.
MOEFLUX_INLINE void store_byte(uint64_t* bits, int64_t first, uint32_t byte) {
  reinterpret_cast<unsigned char*>(bits)[first / choice_lanes] = static_cast<unsigned char>(byte);
}

static int64_t find_values(const double* values, int64_t count, const ChoiceBracket& bracket, uint64_t* bits) {
  int64_t above = 0;
  for (int64_t first = 0; first < count; first += choice_lanes) {
    uint32_t found = 0;
    uint32_t greater = 0;
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < choice_lanes; i += wide) {
      const Doubles some = load<Doubles>(values + first + i);
      found |= bits_of_least(some, bracket.least) << i;
      greater |= bits_above(some, bracket.most) << i;
    }
    store_byte(bits, first, found & ~greater);
    above += __builtin_popcount(greater);
  }
  return above;
}

static void rank(const float* probes, int64_t count, float greatest, float nearest, float farthest, uint32_t* ranks) {
  for (int64_t i = 0; i < count; i += lanes) {
    const Floats distance = max(greatest - load<Floats>(probes + i), splat(nearest));
    store(ranks + i, distance < farthest ? distance : splat(farthest));
  }
}

template <typename Number>
static int64_t list(const Number* numbers, const uint64_t* bits, int64_t first_token, double* values, int32_t* tokens) {
  int64_t count = 0;
  for (int64_t word = 0; word < choice_long_words; ++word) {
    uint64_t rest = bits[word];
    const int64_t end = count + __builtin_popcountll(rest);
    // Some at a time, whether there are as many or not: how many a word has nobody could foretell.
    for (; count < end; count += spare_choice_places) {
      MOEFLUX_UNROLL
      for (int64_t i = 0; i < spare_choice_places; ++i) {
        const int64_t place = 64 * word + __builtin_ctzll(rest | uint64_t{1} << 63);
        values[count + i] = numbers[place];
        tokens[count + i] = static_cast<int32_t>(first_token + place);
        rest &= rest - 1;
      }
    }
    count = end;
  }
  return count;
}

template <bool weighed>
MOEFLUX_INLINE ChoiceAbove sum_all_above(const double* values, const double* worths, int64_t count, double value) {
  Doubles above[parts] = {};
  int64_t number = 0;
  for (int64_t first = 0; first < count; first += choice_lanes) {
    MOEFLUX_UNROLL
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t i = first + part * wide;
      const Doubles some = load<Doubles>(values + i);
      number += __builtin_popcount(bits_above(some, value));
      if constexpr (weighed) above[part] = some > value ? above[part] + load<Doubles>(worths + i) : above[part];
    }
  }
  return {weighed ? total(above) : static_cast<double>(number), number};
}

static ChoiceAbove sum_above(const double* values, const double* worths, int64_t count, double value) {
  return worths ? sum_all_above<true>(values, worths, count, value)
                : sum_all_above<false>(values, worths, count, value);
}

static void forbid(const float* logits, const uint32_t* allowed, float* out) {
  for (int64_t word = 0; word < choice_words; ++word) {
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < 32; i += lanes) {
      const int64_t place = 32 * word + i;
      store(out + place, load_where(logits + place, allowed[word] >> i));
    }
  }
}

// ---- Changing -------------------------------------------------------------------------------------------------------

static void widen(const float* logits, const uint32_t* allowed, double* out) {
  const auto* const bytes = reinterpret_cast<const unsigned char*>(allowed);
  for (int64_t first = 0; first < choice_block; first += choice_lanes) {
    __builtin_prefetch(logits + choice_block + first);
#if defined(__AVX512F__)
    const __m512d some = _mm512_mask_cvtps_pd(_mm512_set1_pd(static_cast<double>(minus_infinity)),
                                              bytes[first / choice_lanes], _mm256_loadu_ps(logits + first));
    store(out + first, some);
#else
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < choice_lanes; i += wide)
      store(out + first + i, lanes_of(bytes[first / choice_lanes] >> i) ? load_values(logits + first + i)
                                                                        : splat(static_cast<double>(minus_infinity)));
#endif
  }
}

#if defined(__AVX512F__)
MOEFLUX_INLINE Doubles load_places(const float* logits, const int32_t* places) {
  return (Doubles)_mm512_maskz_cvtps_pd(0xff,
                                        _mm256_i32gather_ps(logits, _mm256_loadu_si256((const __m256i*)places), 4));
}
#else
MOEFLUX_INLINE Doubles load_places(const float* logits, const int32_t* places) {
  Doubles some;
  for (int64_t i = 0; i < wide; ++i) some[i] = logits[places[i]];
  return some;
}
#endif

// Lanes of -1 or 0.
MOEFLUX_INLINE LongInts are_allowed(const uint32_t* allowed, const int32_t* places) {
  LongInts some;
  for (int64_t i = 0; i < wide; ++i) some[i] = -static_cast<int64_t>(allowed[places[i] / 32] >> (places[i] % 32) & 1);
  return some;
}

static double change(const float* logits, const ChangedPlaces& changed, const Penalties& penalties,
                     const uint32_t* allowed, double* values) {
  const Doubles none = splat(static_cast<double>(minus_infinity));
  Doubles best = none;
  LongInts bad = {};
  LongInts lane;
  for (int64_t i = 0; i < wide; ++i) lane[i] = i;
  for (int64_t first = 0; first < changed.count; first += wide) {
    Doubles value = load_places(logits, changed.places + first);
    if (changed.biases) value += load<Doubles>(changed.biases + first);
    const HalfInts times = load<HalfInts>(changed.times + first);
    const Doubles number = doubles_of(times & std::numeric_limits<int32_t>::max());
    const Doubles penalized = value > 0 ? value / penalties.repetition : value * penalties.repetition;
    value = longs_of(times) < 0 ? penalized : value;
    value -= number > 0 ? penalties.presence + penalties.frequency * number : Doubles{};
    if (allowed) value = are_allowed(allowed, changed.places + first) ? value : none;
    value = lane < changed.count - first ? value : none;
    store(values + first, value);
    bad |= ~(LongInts)(value < -none);
    best = value > best ? value : best;
  }
  double greatest = best[0];
  int64_t any = 0;
  for (int64_t i = 0; i < wide; ++i) {
    greatest = best[i] > greatest ? best[i] : greatest;
    any |= bad[i];
  }
  return any != 0 ? __builtin_nan("") : greatest;
}

// ---- Weights --------------------------------------------------------------------------------------------------------

// 2^x for |x| at most a half. The last coefficients are 1, and so is 2^0.
template <bool rough>
MOEFLUX_INLINE Doubles power_of_2(Doubles x) {
  constexpr double exact_terms[] = {
      0x1.e9d3fe3952179p-32, 0x1.e6063f7217bc6p-28, 0x1.b524fae627834p-24, 0x1.62bfd47773353p-20,
      0x1.ffcbfc670dcd4p-17, 0x1.430913096fd9fp-13, 0x1.5d87fe78a5276p-10, 0x1.3b2ab6fba1ddap-7,
      0x1.c6b08d704a0c2p-5,  0x1.ebfbdff82c598p-3,  0x1.62e42fefa39efp-1,  1.0,
  };
  constexpr double rough_terms[] = {
      0x1.00a581594758ep-16, 0x1.443fffc90db59p-13, 0x1.5d879ead06a82p-10, 0x1.3b2a1b7152befp-7,
      0x1.c6b08d883dca1p-5,  0x1.ebfbe045f4d3cp-3,  0x1.62e42fefa39efp-1,  1.0,
  };
  const double* terms = rough ? rough_terms : exact_terms;
  constexpr int64_t count = rough ? 8 : 12;
  Doubles sum = splat(terms[0]);
  MOEFLUX_UNROLL
  for (int64_t i = 1; i < count; ++i) sum = fma(sum, x, splat(terms[i]));
  return sum;
}

template <bool rough, bool split, bool stored, typename Number>
MOEFLUX_INLINE ChoiceSums weigh_all(const Number* values, int64_t count, const ChoiceScale& scale,
                                    const ChoiceBracket& bracket, double* weights, uint64_t* bits) {
  Doubles all[parts] = {};
  Doubles upto[parts] = {};
  const Doubles factor = splat(scale.factor);
  for (int64_t first = 0; first < count; first += choice_lanes) {
    uint32_t found = 0;
    MOEFLUX_UNROLL
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t i = first + part * wide;
      const Doubles value = load_values(values + i);
      const Doubles distance = value - scale.greatest;
      // Adding 1.5 * 2^52 rounds to a whole number and leaves it in the low bits.
      const Doubles shifted = fma(distance, factor, splat(0x1.8p+52));
      const Doubles whole = shifted - 0x1.8p+52;
      const Doubles rest = fma(distance, factor, -whole);
      const Doubles power = (Doubles)((LongWords)power_of_2<rough>(rest) + ((LongWords)shifted << 52));
      const Doubles weight = value >= scale.least ? power : Doubles{};
      if constexpr (stored) store(weights + i, weight);
      all[part] += weight;
      if constexpr (split) {
        found |= bits_within(value, bracket) << (part * wide);
        upto[part] = add_above(upto[part], weight, value, bracket.most);
      }
    }
    if constexpr (split) store_byte(bits, first, found);
  }
  const double sum = total(all);
  return {sum, split ? sum - total(upto) : 0};
}

template <bool rough, typename Number>
static ChoiceSums weigh(const Number* values, int64_t count, const ChoiceScale& scale, const ChoiceBracket& bracket,
                        double* weights, uint64_t* bits) {
  if (bits) return weigh_all<rough, true, false>(values, count, scale, bracket, weights, bits);
  return weights ? weigh_all<rough, false, true>(values, count, scale, bracket, weights, bits)
                 : weigh_all<rough, false, false>(values, count, scale, bracket, weights, bits);
}

constexpr ChoiceKernels choice_kernels = {
    greatest,
    find,
    find_values,
    rank,
    list<float>,
    list<double>,
    sum_above,
    forbid,
    widen,
    change,
    weigh<false, float>,
    weigh<true, float>,
    weigh<false, double>,
    weigh<true, double>,
};

}  // namespace moeflux::cpu::MOEFLUX_ISA
