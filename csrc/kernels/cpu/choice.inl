// Choosing a token: passes over a block, each number in the lane of its place modulo `choice_lanes`.

#include "kernels/cpu/choice.h"
#include "kernels/cpu/lanes.h"

namespace moeflux::cpu::MOEFLUX_ISA {

constexpr int64_t wide = lanes / 2;  // f64 in a register

typedef double Doubles __attribute__((vector_size(wide * 8)));
typedef decltype(Doubles{} < Doubles{}) Longs;  // of long or of long long, as the compiler likes
typedef uint64_t LongWords __attribute__((vector_size(wide * 8)));
typedef float HalfFloats __attribute__((vector_size(wide * 4)));

// Sums are of so many parts with every instruction set.
constexpr int64_t choice_lanes = 8;
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

// One bit a lane.
MOEFLUX_INLINE uint64_t bits_of(Longs mask) {
#if defined(__AVX512F__)
  return _mm512_movepi64_mask((__m512i)mask);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_pd((__m256d)mask));
#else
  uint64_t bits = 0;
  for (int64_t i = 0; i < wide; ++i) bits |= static_cast<uint64_t>(mask[i] & 1) << i;
  return bits;
#endif
}

MOEFLUX_INLINE uint64_t bits_of(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)mask));
#else
  uint64_t bits = 0;
  for (int64_t i = 0; i < lanes; ++i) bits |= static_cast<uint64_t>(mask[i] & 1) << i;
  return bits;
#endif
}

// All bits of a lane where its own bit is 1, from the lowest on.
MOEFLUX_INLINE void spread(uint32_t bits, Longs& mask) {
  LongWords own;
  for (int64_t i = 0; i < wide; ++i) own[i] = uint64_t{1} << i;
  mask = (Longs)(((uint64_t{bits} - LongWords{}) & own) != 0);
}

MOEFLUX_INLINE void spread(uint32_t bits, Ints& mask) {
  Words own;
  for (int64_t i = 0; i < lanes; ++i) own[i] = 1u << i;
  mask = (Ints)(((bits - Words{}) & own) != 0);
}

// The parts of a sum, neighbours far apart first.
MOEFLUX_INLINE double total(const Doubles (&sums)[parts]) {
  double part[choice_lanes];
  __builtin_memcpy(part, sums, sizeof part);
  for (int64_t step = choice_lanes / 2; step > 0; step /= 2)
    for (int64_t i = 0; i < step; ++i) part[i] += part[i + step];
  return part[0];
}

template <typename Number>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef Floats Type;
  static constexpr int64_t size = lanes;
};
template <>
struct VectorOf<double> {
  typedef Doubles Type;
  static constexpr int64_t size = wide;
};

// ---- Comparing ------------------------------------------------------------------------------------------------------

template <typename Number>
static double greatest(const Number* values, int64_t row, float* tops, float* samples) {
  using Vector = typename VectorOf<Number>::Type;
  constexpr int64_t size = VectorOf<Number>::size;
  constexpr int64_t vectors = choice_columns / size;
  constexpr Number infinity = __builtin_inff();
  Vector best[vectors];
  decltype(Vector{} < Vector{}) bad = {};
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < vectors; ++i) best[i] = -infinity - Vector{};
  for (int64_t first = 0; first < choice_block; first += choice_columns) {
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < vectors; ++i) {
      const Vector some = load<Vector>(values + first + i * size);
      best[i] = some > best[i] ? some : best[i];
      bad |= ~(some < infinity);
    }
  }
  Number of_column[choice_columns];
  __builtin_memcpy(of_column, best, sizeof of_column);
  Number found = of_column[0];
  for (int64_t i = 0; i < choice_columns; ++i) {
    found = of_column[i] > found ? of_column[i] : found;
    tops[i] = static_cast<float>(of_column[i]);
  }
  for (int64_t sample = 0; sample < choice_samples; ++sample, row += choice_rows / choice_samples) {
    const Number* elements = values + row % choice_rows * choice_columns;
    const Number* others = values + (row + 1) % choice_rows * choice_columns;
    for (int64_t i = 0; i < choice_columns; ++i)
      samples[sample * choice_columns + i] = static_cast<float>(elements[i] == of_column[i] ? others[i] : elements[i]);
  }
  bool any = false;
  for (int64_t i = 0; i < size; ++i) any |= bad[i] != 0;
  return any ? __builtin_nan("") : found;
}

template <typename Number>
static int64_t count_above(const Number* values, Number most) {
  using Vector = typename VectorOf<Number>::Type;
  constexpr int64_t size = VectorOf<Number>::size;
  decltype(Vector{} < Vector{}) counts = {};
  for (int64_t i = 0; i < choice_block; i += size) counts -= load<Vector>(values + i) > most;
  int64_t count = 0;
  for (int64_t i = 0; i < size; ++i) count += counts[i];
  return count;
}

template <typename Number>
static void find_within(const Number* values, Number least, Number most, uint64_t* bits) {
  using Vector = typename VectorOf<Number>::Type;
  constexpr int64_t size = VectorOf<Number>::size;
  for (int64_t word = 0; word < choice_long_words; ++word) {
    uint64_t found = 0;
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < 64; i += size) {
      const Vector some = load<Vector>(values + 64 * word + i);
      found |= bits_of((some >= least) & (some <= most)) << i;
    }
    bits[word] = found;
  }
}

// ---- Values ---------------------------------------------------------------------------------------------------------

MOEFLUX_INLINE Doubles load_values(const double* from) { return load<Doubles>(from); }
MOEFLUX_INLINE Doubles load_values(const float* from) {
  return __builtin_convertvector(load<HalfFloats>(from), Doubles);
}

static void widen(const float* logits, double* values) {
  for (int64_t i = 0; i < choice_block; i += wide) store(values + i, load_values(logits + i));
}

template <typename Number>
static void forbid(const Number* values, const uint32_t* allowed, Number* out) {
  using Vector = typename VectorOf<Number>::Type;
  constexpr int64_t size = VectorOf<Number>::size;
  constexpr Number infinity = __builtin_inff();
  for (int64_t i = 0; i < choice_block; i += size) {
    decltype(Vector{} < Vector{}) chosen;
    spread(allowed[i / 32] >> (i % 32), chosen);
    store(out + i, chosen ? load<Vector>(values + i) : splat(-infinity));
  }
}

template <typename Number>
static void drop(const Number* values, Number least, Number* out) {
  using Vector = typename VectorOf<Number>::Type;
  constexpr int64_t size = VectorOf<Number>::size;
  constexpr Number infinity = __builtin_inff();
  for (int64_t i = 0; i < choice_block; i += size) {
    const Vector some = load<Vector>(values + i);
    store(out + i, some >= least ? some : splat(-infinity));
  }
}

// a / b, rounded as a division is, which takes as long as everything else that is done to a value: with the reciprocal,
// rounded, two corrections of the quotient leave nothing that could be rounded wrongly (Markstein's theorem).
MOEFLUX_INLINE Doubles divide(Doubles a, Doubles b, Doubles reciprocal) {
  Doubles quotient = a * reciprocal;
  quotient = fma(fma(-quotient, b, a), reciprocal, quotient);
  return fma(fma(-quotient, b, a), reciprocal, quotient);
}

template <bool quick>
MOEFLUX_INLINE void penalize_all(double* values, const uint32_t* seen, double penalty) {
  const Doubles by = splat(penalty);
  const Doubles reciprocal = splat(1 / penalty);
  for (int64_t word = 0; word < choice_words; ++word) {
    if (seen[word] == 0) continue;
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < 32; i += wide) {
      double* place = values + 32 * word + i;
      const Doubles some = load<Doubles>(place);
      const Doubles quotient = quick ? divide(some, by, reciprocal) : some / by;
      Longs chosen;
      spread(seen[word] >> i, chosen);
      store(place, chosen ? (some > 0 ? quotient : some * by) : some);
    }
  }
}

static void penalize(double* values, const uint32_t* seen, double penalty, bool quick) {
  quick ? penalize_all<true>(values, seen, penalty) : penalize_all<false>(values, seen, penalty);
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

template <bool rough, bool split, typename Number>
MOEFLUX_INLINE ChoiceSums weigh_all(const Number* values, const ChoiceScale& scale, double most, double* weights) {
  Doubles all[parts] = {};
  Doubles above[parts] = {};
  const Doubles factor = splat(scale.factor);
  for (int64_t first = 0; first < choice_block; first += choice_lanes) {
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
      const Doubles weight = whole >= least_choice_exponent ? power : Doubles{};
      store(weights + i, weight);
      all[part] += weight;
      if constexpr (split) above[part] += value > most ? weight : Doubles{};
    }
  }
  return {total(all), total(above)};
}

template <bool rough, typename Number>
static ChoiceSums weigh(const Number* values, const ChoiceScale& scale, double most, double* weights) {
  return most < __builtin_inf() ? weigh_all<rough, true>(values, scale, most, weights)
                                : weigh_all<rough, false>(values, scale, most, weights);
}

template <typename Number>
constexpr ChoiceValueKernels<Number> choice_value_kernels = {
    greatest<Number>, count_above<Number>,   find_within<Number>,  forbid<Number>,
    drop<Number>,     weigh<false, Number>, weigh<true, Number>,
};

constexpr ChoiceKernels choice_kernels = {
    choice_value_kernels<float>, choice_value_kernels<double>, widen, penalize,
};

}  // namespace moeflux::cpu::MOEFLUX_ISA
