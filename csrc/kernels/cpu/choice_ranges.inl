// Choosing a token: the first pass, over ranges, tops and samples.
#pragma once

#include "kernels/cpu/choice_changes.inl"
#include "kernels/cpu/choice_lanes.inl"

namespace moeflux::cpu::MOEFLUX_ISA {

// Of the lanes of a mask alone.
MOEFLUX_INLINE Floats max_in(FloatLanes mask, Floats best, Floats some) {
#if defined(__AVX512F__)
  return (Floats)_mm512_mask_max_ps((__m512)best, mask, (__m512)some, (__m512)best);
#else
  return max(select(mask, splat(minus_infinity), some), best);
#endif
}
// Those of the mask that are below a number, and no NaN.
MOEFLUX_INLINE FloatLanes below(FloatLanes mask, Floats some, float value) {
#if defined(__AVX512F__)
  return _mm512_mask_cmp_ps_mask(mask, (__m512)some, _mm512_set1_ps(value), _CMP_LT_OQ);
#else
  return (some < value) & mask;
#endif
}

// Of each column of a block's logits the greatest: of all of them, of those that are values as they are, and of those
// that have the penalty. And the least of each, and whether each is less than infinity.
struct RawRange {
  static constexpr int64_t vectors = choice_columns / lanes;

  Floats all[vectors];
  Floats plain[vectors];
  Floats penalized[vectors];
  Floats least[vectors];
  FloatLanes good[vectors];

  [[gnu::always_inline]] void begin() {
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < vectors; ++i) {
      all[i] = plain[i] = penalized[i] = splat(minus_infinity);
      least[i] = splat(-minus_infinity);
      good[i] = floats_of(~uint32_t{0});
    }
  }
  [[gnu::always_inline]] void add(const RawRange& other) {
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < vectors; ++i) {
      all[i] = max(all[i], other.all[i]);
      plain[i] = max(plain[i], other.plain[i]);
      penalized[i] = max(penalized[i], other.penalized[i]);
      least[i] = other.least[i] < least[i] ? other.least[i] : least[i];
      good[i] &= other.good[i];
    }
  }
  [[gnu::always_inline]] bool are_all_good() const {
    FloatLanes every = good[0];
    for (const FloatLanes each : good) every &= each;
    return bits_of(every) == bits_of(floats_of(~uint32_t{0}));
  }
};

template <bool any_marked, bool any_penalized, bool all_wanted>
MOEFLUX_INLINE RawRange raw_range(const MarkedLogits& marked, [[maybe_unused]] const float* next) {
  constexpr int64_t rows = 4;  // side by side: each waits for what was found in its last row
  RawRange found[rows];
  MOEFLUX_UNROLL
  for (int64_t row = 0; row < rows; ++row) found[row].begin();
  for (int64_t first = 0; first < choice_block; first += rows * choice_columns) {
    MOEFLUX_UNROLL
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = first + row * choice_columns;
      RawRange& own = found[row];
      if constexpr (!(any_marked && all_wanted)) __builtin_prefetch(next + at);
      MOEFLUX_UNROLL
      for (int64_t i = 0; i < RawRange::vectors; ++i) {
        const Floats some = load<Floats>(marked.logits + at + i * lanes);
        if constexpr (all_wanted) own.all[i] = max(some, own.all[i]);
        if constexpr (any_marked) own.plain[i] = max_in(floats_at(marked.plain, at + i * lanes), own.plain[i], some);
        if constexpr (any_penalized)
          own.penalized[i] = max_in(floats_at(marked.penalized, at + i * lanes), own.penalized[i], some);
        own.least[i] = some < own.least[i] ? some : own.least[i];
        own.good[i] = below(own.good[i], some, -minus_infinity);
      }
    }
  }
  MOEFLUX_UNROLL
  for (int64_t row = 1; row < rows; ++row) found[0].add(found[row]);
  return found[0];
}

// Is each of those that are values less than infinity?
template <bool any_marked, bool any_penalized>
MOEFLUX_COLD bool are_good(const MarkedLogits& marked) {
  FloatLanes bad = {};
  for (int64_t first = 0; first < choice_block; first += lanes) {
    FloatLanes values = floats_of(~uint32_t{0});
    if constexpr (any_marked) values = Marks<any_penalized>::at(marked, first).values;
    bad |= static_cast<FloatLanes>(values & ~below(values, load<Floats>(marked.logits + first), -minus_infinity));
  }
  return bits_of(bad) == 0;
}

// Of a number for each column the greatest.
MOEFLUX_INLINE float greatest_column(const Floats (&some)[RawRange::vectors]) {
#if defined(__AVX512F__)
  Floats best = some[0];
  const auto turned = [&](int by) __attribute__((always_inline)) {
    const auto from = (__m512)best;
    return (Floats)(by == 8   ? _mm512_maskz_shuffle_f32x4(0xffff, from, from, 0x4e)
                    : by == 4 ? _mm512_maskz_shuffle_f32x4(0xffff, from, from, 0xb1)
                    : by == 2 ? _mm512_maskz_shuffle_ps(0xffff, from, from, 0x4e)
                              : _mm512_maskz_shuffle_ps(0xffff, from, from, 0xb1));
  };
  MOEFLUX_UNROLL
  for (int by = lanes / 2; by > 0; by /= 2) best = max(turned(by), best);
  return best[0];
#else
  float column[choice_columns];
  __builtin_memcpy(column, some, sizeof some);
  float best = column[0];
  for (int64_t i = 1; i < choice_columns; ++i) best = column[i] > best ? column[i] : best;
  return best;
#endif
}

// The samples, and the range of what the columns have.
template <typename Near>
MOEFLUX_INLINE ChoiceRange probe(const Near& near, const Floats (&best)[RawRange::vectors],
                                 const Floats (&lowest)[RawRange::vectors], int64_t row, float* tops, float* samples) {
  __builtin_memcpy(tops, best, sizeof best);
  Floats negated[RawRange::vectors];
  for (int64_t i = 0; i < RawRange::vectors; ++i) negated[i] = -lowest[i];
  const ChoiceRange found = {-greatest_column(negated), greatest_column(best)};
  for (int64_t sample = 0; sample < choice_samples; ++sample, row += sampled_rows) {
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < RawRange::vectors; ++i) {
      const auto values_of = [&](int64_t other_row) __attribute__((always_inline)) {
        return near(other_row % choice_rows * choice_columns + i * lanes);
      };
      const Floats own = values_of(row);
      store(samples + sample * choice_columns + i * lanes, own == best[i] ? values_of(row + 1) : own);
    }
  }
  return found;
}

MOEFLUX_INLINE ChoiceRange range_of_logits(const MarkedLogits& marked, const RawRange& raw, int64_t row, float* tops,
                                           float* samples) {
  const auto own = [&](int64_t first) __attribute__((always_inline)) { return load<Floats>(marked.logits + first); };
  ChoiceRange found = probe(own, raw.all, raw.least, row, tops, samples);
  if (!raw.are_all_good() && !are_good<false, false>(marked)) found.greatest = __builtin_nanf("");
  return found;
}

// Near values ascend as logits do: the greatest of those with the penalty is that of the greatest logit.
template <bool any_penalized, bool all_wanted>
MOEFLUX_INLINE ChoiceRange range_of_marked(const MarkedLogits& marked, const Penalties& penalties, const float* next,
                                           int64_t row, float* tops, float* samples, ChoiceProbes* own) {
  const Floats by = splat(static_cast<float>(penalties.repetition));
  const Floats reciprocal = splat(static_cast<float>(1 / penalties.repetition));
  const FloatLanes every = floats_of(~uint32_t{0});
  RawRange raw = raw_range<true, any_penalized, all_wanted>(marked, next);
  if constexpr (all_wanted) own->range = range_of_logits(marked, raw, row, own->tops, own->samples);
  if constexpr (any_penalized) {
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < RawRange::vectors; ++i) {
      raw.plain[i] = max(raw.plain[i], nearly_penalized(every, raw.penalized[i], by, reciprocal));
      const Floats least = nearly_penalized(every, raw.least[i], by, reciprocal);
      raw.least[i] = least < raw.least[i] ? least : raw.least[i];
    }
  }
  const auto near = [&](int64_t first) __attribute__((always_inline)) {
    const auto marks = Marks<any_penalized>::at(marked, first);
    Floats values = load<Floats>(marked.logits + first);
    if constexpr (any_penalized) values = nearly_penalized(marks.penalized, values, by, reciprocal);
    return select(marks.values, splat(minus_infinity), values);
  };
  ChoiceRange found = probe(near, raw.plain, raw.least, row, tops, samples);
  if (!raw.are_all_good() && !are_good<true, any_penalized>(marked)) found.greatest = __builtin_nanf("");
  return found;
}

static ChoiceRange range(const MarkedLogits& marked, const Penalties& penalties, const float* next, int64_t row,
                         float* tops, float* samples, ChoiceProbes* own) {
  if (!marked.plain) return range_of_logits(marked, raw_range<false, false, true>(marked, next), row, tops, samples);
  if (marked.penalized)
    return own ? range_of_marked<true, true>(marked, penalties, next, row, tops, samples, own)
               : range_of_marked<true, false>(marked, penalties, next, row, tops, samples, own);
  return own ? range_of_marked<false, true>(marked, penalties, next, row, tops, samples, own)
             : range_of_marked<false, false>(marked, penalties, next, row, tops, samples, own);
}

}  // namespace moeflux::cpu::MOEFLUX_ISA
