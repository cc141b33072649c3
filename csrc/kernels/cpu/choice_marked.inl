// Choosing a token: weights of a block of which some logits have the repetition penalty or are no values.
#pragma once

#include "kernels/cpu/choice_weights.inl"

namespace moeflux::cpu::MOEFLUX_ISA {

#if defined(__AVX512F__)

// Bounds of half as many f32 as there are in a register.
struct HalfBound {
  __m256 plain;
  __m256 penalized;

  template <bool any_penalized>
  [[gnu::always_inline]] __m256 of(Lanes penalty) const {
    return any_penalized ? _mm256_mask_mov_ps(plain, penalty, penalized) : plain;
  }
};

// Logits are compared as they are. A penalty is a part of the factor: that rounds once more, by less than rough weights
// are off.
template <bool split, bool any_penalized>
MOEFLUX_INLINE ChoiceSums weigh_all_marked(const MarkedLogits& marked, const Penalties& penalties,
                                           const ChoiceScale& asked, const MarkedBounds& bounds, uint64_t* bits) {
  const ChoiceScale scale = asked;  // what no store can change
  const auto bound = [](float plain, float penalized) {
    return HalfBound{_mm256_set1_ps(plain), _mm256_set1_ps(penalized)};
  };
  const ChoiceRange plain_range = floats_within(bounds.plain.within);
  const ChoiceRange penalized_range = floats_within(bounds.penalized.within);
  const HalfBound from = bound(round_up(bounds.plain.least), round_up(bounds.penalized.least));
  const HalfBound least = bound(plain_range.least, penalized_range.least);
  const HalfBound most = bound(plain_range.greatest, penalized_range.greatest);
  const Doubles factor = splat(scale.factor);
  const Doubles multiplied = splat(scale.factor * penalties.repetition);
  const Doubles divided = splat(scale.factor / penalties.repetition);
  const auto* const plain_bytes = reinterpret_cast<const unsigned char*>(marked.plain);
  const auto* const penalized_bytes = reinterpret_cast<const unsigned char*>(marked.penalized);
  auto* const found_bytes = reinterpret_cast<unsigned char*>(bits);
  Doubles sum = {};
  Doubles sum_above = {};
  for (int64_t first = 0; first < choice_block; first += choice_together * wide) {
    Together<choice_together> all;
    Lanes above[choice_together];
    MOEFLUX_UNROLL
    for (int64_t v = 0; v < choice_together; ++v) {
      const int64_t at = first + v * wide;
      const __m256 some = _mm256_loadu_ps(marked.logits + at);
      Lanes values = plain_bytes[at / 8];
      Lanes penalty = 0;
      if constexpr (any_penalized) values |= penalty = penalized_bytes[at / 8];
      const Lanes kept = _mm256_mask_cmp_ps_mask(values, some, from.of<any_penalized>(penalty), _CMP_GE_OQ);
      if constexpr (split) {
        above[v] = _mm256_mask_cmp_ps_mask(kept, some, most.of<any_penalized>(penalty), _CMP_GT_OQ);
        // Stored byte by byte: GCC would make words of them, for which it moves the masks to other registers.
        *const_cast<volatile unsigned char*>(found_bytes + at / 8) =
            _mm256_mask_cmp_ps_mask(kept & ~above[v], some, least.of<any_penalized>(penalty), _CMP_GE_OQ);
      }
      all.kept[v] = kept;
      all.rest[v] = (Doubles)_mm512_maskz_cvtps_pd(0xff, some);
      all.factors[v] = factor;
      if constexpr (any_penalized) {
        const Lanes positive = _mm256_mask_cmp_ps_mask(penalty, some, __m256{}, _CMP_GT_OQ);
        all.factors[v] = select(positive, select(penalty, factor, multiplied), divided);
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
