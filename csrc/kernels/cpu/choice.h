// What choosing a token does with every logit of a vocabulary, a block of it at a time, and with lists of values to
// which something was done.
//
// Unlike the other kernels these give the same bits with every instruction set: which token a seed stands for is not to
// depend on the machine. So each addition has its place, whatever the vectors, and a multiply-add has one rounding
// everywhere; the portable kernels, which have no instruction for it, are slow.
#pragma once

#include <cstdint>
#include <limits>

namespace moeflux::cpu {

constexpr int64_t choice_block = 2048;
// Of bit sets: bit i of word w for element 32 * w + i, or 64 * w + i.
constexpr int64_t choice_words = choice_block / 32;
constexpr int64_t choice_long_words = choice_block / 64;
// A block is looked at as this many columns, its element i in column i % choice_columns.
constexpr int64_t choice_columns = 16;
constexpr int64_t choice_rows = choice_block / choice_columns;
constexpr int64_t choice_samples = 2;
// Sums are of so many parts with every instruction set.
constexpr int64_t choice_lanes = 8;

constexpr int64_t choice_blocks(int64_t values) { return (values + choice_block - 1) / choice_block; }

// A weight is 2^((value - greatest) * factor). What is less than `least` weighs nothing.
//
// Rough weights are 2^(value * factor - origin), for which the processor has one thing less to do: all of them are
// greater by the same factor, or all smaller.
struct ChoiceScale {
  double greatest = 0;
  double factor = 1;
  double least = 0;   // its exponent is at least `least_choice_exponent`; -inf: no value is less than that
  double origin = 0;  // the whole number of eighths next to greatest * factor

  bool can_be_rough() const { return origin > -0x1p+30 && origin < 0x1p+30; }
};

constexpr double least_choice_exponent = -1021;
// Rough weights are off by less than this share of themselves; exact ones by some units of the last place.
constexpr double rough_choice_error = 9e-11;

// Values in which a cut lies, ends included.
struct ChoiceBracket {
  double least;
  double most;
};

// A block's logits. Those with a bit in `plain`, all where it is null, are values as they are; those with one in
// `penalized`, none where it is null, have the repetition penalty. No logit has both, and those without are no values.
struct MarkedLogits {
  const float* logits = nullptr;
  const uint32_t* plain = nullptr;
  const uint32_t* penalized = nullptr;
};

// The same bracket for the logits that are values and for those that have the penalty: values ascend as logits do. What
// is below `least` is left out.
struct ChoiceBounds {
  double least;
  ChoiceBracket within;
};
struct MarkedBounds {
  ChoiceBounds plain;
  ChoiceBounds penalized;
};

// Sums of weights: of all, and of those whose values are above a bracket.
struct ChoiceSums {
  double all = 0;
  double above = 0;
};

// Of `count` values, a multiple of choice_lanes. Into `bits`, a byte for so many, which of them lie in the bracket;
// null: nobody asks for that, nor for the sum above. `weights` null: only the sums are wanted. Where the scale has no
// least weight, the last choice_lanes values may be -inf.
template <typename Number>
using ChoiceWeigh = ChoiceSums (*)(const Number* values, int64_t count, const ChoiceScale& scale,
                                   const ChoiceBracket& bracket, double* weights, uint64_t* bits);

template <typename Number>
using ChoiceList = int64_t (*)(const Number* numbers, const uint64_t* bits, int64_t first_token, double* values,
                               int32_t* tokens);

// Tokens of a block to which something is done before they are weighed.
struct ChangedPlaces {
  const int32_t* places;  // in the block
  const int32_t* times;   // how often each was there before; `seen_before` where it was there at all
  const double* biases;   // null: none
  int64_t count;          // behind them each list goes on to a multiple of choice_lanes, with place 0
};

constexpr int32_t seen_before = std::numeric_limits<int32_t>::min();  // the sign: the other bits count

struct Penalties {
  double repetition = 1;
  double presence = 0;
  double frequency = 0;
  // 1 / repetition, and what that was rounded by: f32 numbers times both are quotients, rounded as a division rounds
  // them. 0: they are to be divided.
  double reciprocal = 0;
  double rounded_by = 0;
};

constexpr int64_t spare_choice_places = 3;  // behind the last of a list that is written, so many are overwritten
constexpr int64_t spare_packed = 16;        // and behind the last of packed logits and of probes that are left

// Of the values that exceed one: what they are worth, and their number.
struct ChoiceAbove {
  double worth;
  int64_t number;
};

struct ChoiceRange {
  float least;
  float greatest;
};

// Of a block: its range, the greatest of each column [choice_columns], and other elements of it [choice_samples,
// choice_columns].
struct ChoiceProbes {
  ChoiceRange range;
  float* tops;
  float* samples;
};

// Near values are off by less than this share of themselves.
constexpr double near_choice_error = 0x1p-22;

// A block of logits has choice_block elements. -inf stands for what cannot be chosen.
struct ChoiceKernels {
  // A range that no near value is outside of, and its greatest is one where there are some; that is NaN when one is
  // NaN, and NaN or +inf when one is +inf. Into `tops` [choice_columns] the greatest of each column, into `samples`
  // [choice_samples, choice_columns] other elements of it: those of `row` and of rows far from it, or of the row behind
  // one where an element is the greatest. Meanwhile the block at `next` comes nearer. Where some logits are no values
  // as they are, `own` may ask for the same of all of them as they are, and then nothing comes nearer.
  ChoiceRange (*range)(const MarkedLogits& marked, const Penalties& penalties, const float* next, int64_t row,
                       float* tops, float* samples, ChoiceProbes* own);
  // How many values exceed a bracket, by bounds that leave nothing out. Into `bits` [choice_long_words] which lie in
  // it.
  int64_t (*find)(const MarkedLogits& marked, const MarkedBounds& bounds, uint64_t* bits);
  // One behind the other, into `packed`, the logits with a bit in `some`, all where it is null, that are at least
  // `least`; then -inf, to a multiple of choice_lanes. Returns how many `packed` has, with these. Into `bits`, unless
  // it is null, which of those lie in the bracket.
  int64_t (*pack)(const float* logits, const uint32_t* some, double least, const ChoiceBracket& bracket, float* packed,
                  uint64_t* bits);
  // The first of values, as many and with such bits as where they are weighed.
  int64_t (*find_values)(const double* values, int64_t count, const ChoiceBracket& bracket, uint64_t* bits);
  // Of `count` probes, a multiple of choice_columns, how far each is below the greatest logit: the bits of that
  // distance as f32, which ascend as it does, between those of `nearest` and `farthest`.
  void (*rank)(const float* probes, int64_t count, float greatest, float nearest, float farthest, uint32_t* ranks);
  // Lists which of `count` probes have a rank from `low` to `high` and are worth something. Returns how many they are.
  int64_t (*leave)(const uint32_t* ranks, const double* worths, int64_t count, uint32_t low, uint32_t high,
                   uint32_t* left);
  // Lists those with a bit, and their tokens. Returns how many they are.
  ChoiceList<float> list;
  ChoiceList<double> list_values;
  // Of `count` listed values, a multiple of choice_lanes; each is worth 1 where `worths` is null.
  ChoiceAbove (*sum_above)(const double* values, const double* worths, int64_t count, double value);
  // The values of logits of which those with a bit in `seen` have the repetition penalty, -inf where `allowed` has no
  // bit. Either may be null: none was seen, all are allowed.
  void (*penalize)(const float* logits, const uint32_t* seen, const Penalties& penalties, const uint32_t* allowed,
                   double* values);
  // The values of `count` logits, a multiple of choice_lanes, that all have the penalty. And of a list, where those
  // with a bit in `seen` get it.
  void (*penalize_packed)(const float* logits, int64_t count, const Penalties& penalties, double* values);
  void (*penalize_listed)(double* values, const int32_t* tokens, int64_t count, const uint32_t* seen,
                          const Penalties& penalties);
  // The values of the logits in these places alone, then -inf to a multiple of choice_lanes; and a range that no near
  // value is outside of: its greatest is NaN when one is NaN. Near values raise the tops of their columns, and samples
  // in their places become them.
  ChoiceRange (*change)(const float* logits, const ChangedPlaces& changed, const Penalties& penalties,
                        const uint32_t* allowed, double* values, int64_t row, float* tops, float* samples);
  // The greatest of a block's values; NaN when one is NaN or +inf.
  double (*greatest_value)(const double* values);
  ChoiceWeigh<float> weigh_logits;
  ChoiceWeigh<float> weigh_logits_roughly;
  ChoiceWeigh<double> weigh_values;
  ChoiceWeigh<double> weigh_values_roughly;
  // The sum of all rough weights in a block. Meanwhile the block at `next` comes nearer.
  double (*weigh_block_roughly)(const float* logits, const ChoiceScale& scale, const float* next);
  // Rough weights of all values in a block. Into `bits`, unless it is null, which of them lie in the bracket. Null
  // where it is quicker to make the values first: masks are vectors there. The sums differ in their last bits from
  // those, by much less than rough weights are off, and no token depends on that.
  ChoiceSums (*weigh_marked_roughly)(const MarkedLogits& marked, const Penalties& penalties, const ChoiceScale& scale,
                                     const MarkedBounds& bounds, uint64_t* bits);
};

}  // namespace moeflux::cpu
