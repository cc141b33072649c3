// Choosing a token: weights of a block of which some logits have the repetition penalty or are no values.
#pragma once

#include "kernels/cpu/choice_weights.inl"

namespace moeflux::cpu::MOEFLUX_ISA {

#if defined(__AVX512F__)

typedef FloatLanes StoredLanes __attribute__((may_alias, aligned(1)));

// Logits are compared as they are, as many as a register has: each half of the masks is one of f64 numbers. A penalty
// is a part of the factor: that rounds once more, by less than rough weights are off.
template <bool split, bool any_penalized>
MOEFLUX_INLINE ChoiceSums weigh_all_marked(const MarkedLogits& marked, const Penalties& penalties,
                                           const ChoiceScale& asked, const MarkedBounds& bounds, uint64_t* bits) {
  const ChoiceScale scale = asked;  // what no store can change
  const FloatBound from = {splat(round_up(bounds.plain.least)), splat(round_up(bounds.penalized.least))};
  const FloatBounds within = float_bounds(bounds);
  const Doubles factor = splat(scale.factor);
  const Doubles multiplied = splat(scale.factor * penalties.repetition);
  const Doubles divided = splat(scale.factor / penalties.repetition);
  auto* const found_bytes = reinterpret_cast<unsigned char*>(bits);
  Doubles sum = {};
  Doubles sum_above = {};
  for (int64_t first = 0; first < choice_block; first += choice_together * wide) {
    Together<choice_together> all;
    Lanes above[choice_together];
    MOEFLUX_UNROLL
    for (int64_t v = 0; v < choice_together; v += 2) {
      const int64_t at = first + v * wide;
      const auto logits = (__m512)load<Floats>(marked.logits + at);
      const auto marks = Marks<any_penalized>::at(marked, at);
      const auto is_least = [&](FloatLanes mask, const FloatBound& bound) __attribute__((always_inline)) {
        return _mm512_mask_cmp_ps_mask(mask, logits, (__m512)bound.of(marks), _CMP_GE_OQ);
      };
      const FloatLanes kept = is_least(marks.values, from);
      if constexpr (split) {
        const FloatLanes beyond = _mm512_mask_cmp_ps_mask(kept, logits, (__m512)within.most.of(marks), _CMP_GT_OQ);
        above[v] = static_cast<Lanes>(beyond);
        above[v + 1] = static_cast<Lanes>(beyond >> wide);
        // Stored one by one: GCC would make words of them, for which it moves the masks to other registers.
        *reinterpret_cast<volatile StoredLanes*>(found_bytes + at / 8) = is_least(kept & ~beyond, within.least);
      }
      FloatLanes positive = 0;
      if constexpr (any_penalized) positive = _mm512_mask_cmp_ps_mask(marks.penalized, logits, __m512{}, _CMP_GT_OQ);
      MOEFLUX_UNROLL
      for (int64_t half = 0; half < 2; ++half) {
        all.kept[v + half] = static_cast<Lanes>(kept >> (half * wide));
        all.rest[v + half] = load_values(marked.logits + at + half * wide);
        all.factors[v + half] = factor;
        if constexpr (any_penalized) {
          const auto of_half = [&](FloatLanes mask) { return static_cast<Lanes>(mask >> (half * wide)); };
          all.factors[v + half] =
              select(of_half(positive), select(of_half(marks.penalized), factor, multiplied), divided);
        }
      }
    }
    make_weights<true, false>(all, scale);
    MOEFLUX_UNROLL
    for (int64_t v = 0; v < choice_together; ++v) {
      sum = add_product<false>(all.kept[v], sum, all.rest[v], all.power[v]);
      if constexpr (split) sum_above = add_product<false>(above[v], sum_above, all.rest[v], all.power[v]);
    }
  }
  return {total({sum}), split ? total({sum_above}) : 0};
}

static ChoiceSums weigh_marked(const MarkedLogits& marked, const Penalties& penalties, const ChoiceScale& scale,
                               const MarkedBounds& bounds, uint64_t* bits) {
  if (marked.penalized)
    return bits ? weigh_all_marked<true, true>(marked, penalties, scale, bounds, bits)
                : weigh_all_marked<false, true>(marked, penalties, scale, bounds, bits);
  return bits ? weigh_all_marked<true, false>(marked, penalties, scale, bounds, bits)
              : weigh_all_marked<false, false>(marked, penalties, scale, bounds, bits);
}

constexpr auto weigh_marked_roughly = weigh_marked;

#else

constexpr std::nullptr_t weigh_marked_roughly = nullptr;

#endif

}  // namespace moeflux::cpu::MOEFLUX_ISA
