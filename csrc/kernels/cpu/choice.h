// What choosing a token does with every logit of a vocabulary: a block of it at a time, f32 as the model gives them, or
// f64 when something was done to them.
//
// Unlike the other kernels these give the same bits with every instruction set: which token a seed stands for is not to
// depend on the machine. So each addition has its place, whatever the vectors, and a multiply-add has one rounding
// everywhere; the portable kernels, which have no instruction for it, are slow.
#pragma once

#include <cstdint>

namespace moeflux::cpu {

constexpr int64_t choice_block = 2048;
// Of bit sets: bit i of word w for element 32 * w + i, or 64 * w + i.
constexpr int64_t choice_words = choice_block / 32;
constexpr int64_t choice_long_words = choice_block / 64;
// A block is looked at as this many columns, its element i in column i % choice_columns.
constexpr int64_t choice_columns = 16;
constexpr int64_t choice_rows = choice_block / choice_columns;
constexpr int64_t choice_samples = 2;

constexpr int64_t choice_blocks(int64_t values) { return (values + choice_block - 1) / choice_block; }

// A weight is 2^((value - greatest) * factor).
struct ChoiceScale {
  double greatest = 0;
  double factor = 1;
};

constexpr double least_choice_exponent = -1021;  // of 2; what would weigh less weighs nothing
// Rough weights are off by less than this share of themselves; exact ones by some units of the last place.
constexpr double rough_choice_error = 1.2e-10;

// May a number be divided quickly, or divide? No step of it leaves the range of normal numbers then.
constexpr bool is_quick(double number) { return number > 0x1p-200 && number < 0x1p+200; }

// Sums of weights: of all, and of those whose values are greater than asked for.
struct ChoiceSums {
  double all = 0;
  double above = 0;
};

// Arrays of values and weights have choice_block elements. -inf stands for what cannot be chosen.
template <typename Number>
struct ChoiceValueKernels {
  // The greatest; NaN when one is NaN or +inf. Into `tops` [choice_columns] the greatest of each column, into `samples`
  // [choice_samples, choice_columns] other elements of it: those of `row` and of rows far from it, or of the row behind
  // one where an element is the greatest.
  double (*greatest)(const Number* values, int64_t row, float* tops, float* samples);
  int64_t (*count_above)(const Number* values, Number most);
  // Into `bits` [choice_long_words] which lie from `least` to `most`.
  void (*find_within)(const Number* values, Number least, Number most, uint64_t* bits);
  // Into `out`, which may be `values`: -inf where the bit is 0.
  void (*forbid)(const Number* values, const uint32_t* allowed, Number* out);
  // The same where a value is less than `least`.
  void (*drop)(const Number* values, Number least, Number* out);
  ChoiceSums (*weigh)(const Number* values, const ChoiceScale& scale, double most, double* weights);
  ChoiceSums (*weigh_roughly)(const Number* values, const ChoiceScale& scale, double most, double* weights);
};

struct ChoiceKernels {
  ChoiceValueKernels<float> logits;
  ChoiceValueKernels<double> values;
  void (*widen)(const float* logits, double* values);
  // Where the bit is 1: divided by the penalty when greater than 0, else multiplied by it. `quick`: the penalty and
  // what is greater than 0 can be divided quickly, with the same result.
  void (*penalize)(double* values, const uint32_t* seen, double penalty, bool quick);
};

}  // namespace moeflux::cpu
