// Choosing a token: passes over a block, each number in the lane of its place modulo `choice_lanes`.

#include "kernels/cpu/choice_changes.inl"
#include "kernels/cpu/choice_lanes.inl"
#include "kernels/cpu/choice_marked.inl"
#include "kernels/cpu/choice_ranges.inl"
#include "kernels/cpu/choice_weights.inl"

namespace moeflux::cpu::MOEFLUX_ISA {

MOEFLUX_INLINE uint64_t long_word(const uint32_t* bits, int64_t word) {
  if (!bits) return ~uint64_t{0};
  return bits[2 * word] | static_cast<uint64_t>(bits[2 * word + 1]) << 32;
}

template <bool any_marked, bool any_penalized>
MOEFLUX_INLINE int64_t find_all(const MarkedLogits& marked, const MarkedBounds& asked, uint64_t* bits) {
  const FloatBounds bounds = float_bounds(asked);
  int64_t count = 0;
  for (int64_t word = 0; word < choice_long_words; ++word) {
    uint64_t found = 0;
    uint64_t greater = 0;
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < 64; i += lanes) {
      const Floats each = load<Floats>(marked.logits + 64 * word + i);
      Marks<any_penalized> marks = {};
      if constexpr (any_penalized) marks = Marks<any_penalized>::at(marked, 64 * word + i);
      found |= static_cast<uint64_t>(bits_of(at_least(each, bounds.least.of(marks)))) << i;
      greater |= static_cast<uint64_t>(bits_of(above(each, bounds.most.of(marks)))) << i;
    }
    uint64_t values = ~uint64_t{0};
    if constexpr (any_marked) values = long_word(marked.plain, word);
    if constexpr (any_penalized) values |= long_word(marked.penalized, word);
    bits[word] = found & ~greater & values;
    count += __builtin_popcountll(greater & values);
  }
  return count;
}

static int64_t find(const MarkedLogits& marked, const MarkedBounds& bounds, uint64_t* bits) {
  if (marked.penalized) return find_all<true, true>(marked, bounds, bits);
  if (marked.plain) return find_all<true, false>(marked, bounds, bits);
  return find_all<false, false>(marked, bounds, bits);
}

template <bool finds>
MOEFLUX_INLINE int64_t pack_all(const float* logits, const uint32_t* some, double least, const ChoiceBracket& bracket,
                                float* packed, uint64_t* bits) {
  const ChoiceRange range = finds ? floats_within(bracket) : ChoiceRange{};
  const float from = round_up(least);
  int64_t count = 0;
  for (int64_t word = 0; word < choice_long_words; ++word) {
    const uint64_t wanted = long_word(some, word);
    uint64_t found = 0;
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < 64; i += lanes) {
      const Floats each = load<Floats>(logits + 64 * word + i);
      const uint64_t left = bits_of_least(each, from) & wanted >> i;
      if constexpr (finds) found |= bits_within(left, each, range) << i;
      store_packed(packed + count, each, static_cast<uint32_t>(left));
      count += __builtin_popcountll(left);
    }
    if constexpr (finds) bits[word] = found;
  }
  const int64_t whole = (count + choice_lanes - 1) / choice_lanes * choice_lanes;
  for (; count < whole; ++count) packed[count] = minus_infinity;
  return count;
}

static int64_t pack(const float* logits, const uint32_t* some, double least, const ChoiceBracket& bracket,
                    float* packed, uint64_t* bits) {
  return bits ? pack_all<true>(logits, some, least, bracket, packed, bits)
              : pack_all<false>(logits, some, least, bracket, packed, bits);
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

static int64_t leave(const uint32_t* ranks, const double* worths, int64_t count, uint32_t low, uint32_t high,
                     uint32_t* left) {
  Words places;
  for (int64_t i = 0; i < lanes; ++i) places[i] = static_cast<uint32_t>(i);
  int64_t number = 0;
  for (int64_t first = 0; first < count; first += lanes) {
    uint64_t worthy = 0;
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < lanes; i += wide)
      worthy |= static_cast<uint64_t>(bits_above(load<Doubles>(worths + first + i), 0.0)) << i;
    const uint64_t bits = bits_upto(load<Words>(ranks + first) - low, high - low) & worthy;
    store_packed(left + number, (Floats)(places + static_cast<uint32_t>(first)), static_cast<uint32_t>(bits));
    number += __builtin_popcountll(bits);
  }
  return number;
}

template <typename Number>
static int64_t list(const Number* numbers, const uint64_t* bits, int64_t first_token, double* values, int32_t* tokens) {
  int64_t count = 0;
  for (int64_t word = 0; word < choice_long_words; ++word) {
    uint64_t rest = bits[word];
    const int64_t end = count + __builtin_popcountll(rest);
    // Some at a time, whether there are as many or not: how many a word has nobody could foretell.
    do {
      MOEFLUX_UNROLL
      for (int64_t i = 0; i < spare_choice_places; ++i) {
        const int64_t place = 64 * word + __builtin_ctzll(rest | uint64_t{1} << 63);
        tokens[count + i] = static_cast<int32_t>(first_token + place);
        values[count + i] = numbers[place];
        rest &= rest - 1;
      }
      count += spare_choice_places;
    } while (count < end);
    count = end;
  }
  for (int64_t i = count; i % wide != 0; ++i) {
    tokens[i] = 0;
    values[i] = 0;
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

constexpr ChoiceKernels choice_kernels = {
    range,
    find,
    pack,
    find_values,
    rank,
    leave,
    list<float>,
    list<double>,
    sum_above,
    penalize,
    penalize_packed,
    penalize_listed,
    change,
    greatest_value,
    weigh<false, float>,
    weigh<true, float>,
    weigh<false, double>,
    weigh<true, double>,
    weigh_block_roughly,
    weigh_marked_roughly,
};

}  // namespace moeflux::cpu::MOEFLUX_ISA
