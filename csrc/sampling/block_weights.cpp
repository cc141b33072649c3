// What a block's values weigh.
#include <algorithm>
#include <bit>
#include <cmath>

#include "sampling/blocks.h"

namespace moeflux {

using cpu::choice_block;
using cpu::choice_columns;

// The logarithm of a sum of weights relative to that of the scale's greatest.
double LogitBlocks::log_of(double sum) const {
  const double more = rough_ ? -std::fma(scale_.greatest, scale_.factor, -scale_.origin) : 0;
  return std::log(sum) + more / log2_e;
}

cpu::ChoiceSums LogitBlocks::weigh_values(const double* values, int64_t count, const cpu::ChoiceScale& scale,
                                          const Bracket& bracket, uint64_t* bits) const {
  return (rough_ ? kernels_.weigh_values_roughly : kernels_.weigh_values)(values, count, scale, bracket, nullptr, bits);
}

cpu::ChoiceSums LogitBlocks::weigh(const Bracket& asked, bool finds) {
  const Bracket bracket = {std::max(asked.least, least_), asked.most};
  cpu::ChoiceScale scale = scale_;
  scale.least = std::max(scale.least, least_);
  uint64_t* const bits = finds ? found_.data() : nullptr;
  const auto weigh_logits = rough_ ? kernels_.weigh_logits_roughly : kernels_.weigh_logits;
  // Every value weighs something.
  cpu::ChoiceScale all = scale;
  if (rough_) all.least = -infinity;
  if (!here_.logits) {
    if (values_.tokens) found_ = {};
    return weigh_values(values_.values, static_cast<int64_t>(values_.count), scale, bracket, bits);
  }
  const bool is_whole = none_below_ >= scale.least;
  const bool is_dense = is_whole || leaves_most(scale.least);
  if (!here_.plain && is_dense)
    return weigh_logits(here_.logits, choice_block, is_whole ? all : scale, bracket, nullptr, bits);
  if (is_dense && !can_weigh_marked()) {
    open_values();
    return weigh_values(values_.values, choice_block, is_whole ? all : scale, bracket, bits);
  }
  cpu::ChoiceSums sums =
      is_dense ? kernels_.weigh_marked_roughly(here_, penalties(), scale, bounds_of(scale.least, bracket), bits)
               : weigh_packed(all, bracket, finds);
  if (exceptions_.count > 0) {
    also_found_ = {};
    const cpu::ChoiceSums more = weigh_values(changed_values(block_), whole_vectors(exceptions_.count), scale, bracket,
                                              finds ? also_found_.data() : nullptr);
    sums = {sums.all + more.all, sums.above + more.above};
    if (finds) add_found_exceptions();
  }
  return sums;
}

// Of the model's own logits, while the next block comes nearer.
double LogitBlocks::weigh_own(int64_t block) {
  open(block);
  cpu::ChoiceScale scale = scale_;
  const bool is_whole = none_below_ >= scale.least;
  if (!rough_ || !(is_whole || leaves_most(scale.least))) return weigh();
  if (is_whole) scale.least = -infinity;
  return kernels_.weigh_block_roughly(here_.logits, scale, next_of(block));
}

// Those that the scale of the block leaves, one behind the other.
cpu::ChoiceSums LogitBlocks::weigh_packed(const cpu::ChoiceScale& scale, const Bracket& bracket, bool finds) {
  const auto weigh_logits = rough_ ? kernels_.weigh_logits_roughly : kernels_.weigh_logits;
  const double least = std::max(scale_.least, least_);
  const int64_t count =
      kernels_.pack(here_.logits, here_.plain, least, bracket, left_.data(), finds ? found_.data() : nullptr);
  const cpu::ChoiceSums sums =
      weigh_logits(left_.data(), count, scale, bracket, nullptr, finds ? also_found_.data() : nullptr);
  if (!here_.penalized) return sums;
  const cpu::ChoiceSums more = weigh_penalized(scale, bracket, finds);
  return {sums.all + more.all, sums.above + more.above};
}

// Is a penalty that is a part of the factor near enough, for exponents of that size?
bool LogitBlocks::can_weigh_marked() const {
  constexpr double moderate = 4096;
  return kernels_.weigh_marked_roughly && rough_ && std::abs(scale_.origin) < moderate &&
         (!here_.penalized || penalties().reciprocal > 0);
}

// Are most of the block's values at least this one, by its samples? Fewer are packed before they are weighed.
bool LogitBlocks::leaves_most(double least) const {
  constexpr int64_t samples = cpu::choice_samples * choice_columns;
  const float* const some = samples_of(block_);
  const float from = nearest_float(least);
  int count = 0;
  for (int64_t i = 0; i < samples; ++i) count += some[i] >= from;
  return count > samples * 5 / 8;
}

// Those that have the penalty.
cpu::ChoiceSums LogitBlocks::weigh_penalized(const cpu::ChoiceScale& scale, const Bracket& bracket, bool finds) {
  const double least = least_logit(std::max(scale_.least, least_), known_logits_[0]);
  const Bracket within = finds ? logits_within(bracket) : bracket;
  uint64_t* const bits = finds ? also_found_.data() : nullptr;
  const int64_t count = kernels_.pack(here_.logits, here_.penalized, least, within, left_.data(), bits);
  if (finds) add_found();
  kernels_.penalize_packed(left_.data(), count, penalties(), wide_.data());
  return weigh_values(wide_.data(), count, scale, bracket, bits);
}

// The logits that are in a bracket when they have the penalty.
Bracket LogitBlocks::logits_within(const Bracket& bracket) {
  const double least = least_logit(bracket.least, known_logits_[1]);
  const double above = least_logit(std::nextafter(bracket.most, infinity), known_logits_[2]);
  return {least, std::isinf(above) ? above : std::nextafter(static_cast<float>(above), forbidden)};
}

cpu::MarkedBounds LogitBlocks::bounds_of(double least, const Bracket& bracket) {
  const cpu::ChoiceBounds plain = {least, bracket};
  if (!here_.penalized) return {plain, plain};
  return {plain, {least_logit(least, known_logits_[0]), logits_within(bracket)}};
}

// The least f32 number whose value with the penalty is this one or more: values ascend as logits do. It is asked for
// block by block.
double LogitBlocks::least_logit(double value, KnownLogit& known) const {
  if (known.value == value) return known.logit;
  const double penalty = penalties().repetition;
  // The order of f32 numbers as that of integers.
  const auto number = [](int32_t rank) { return rank < 0 ? -std::bit_cast<float>(-rank) : std::bit_cast<float>(rank); };
  const auto is_below = [&](int32_t rank) {
    const double logit = number(rank);
    return (logit > 0 ? logit / penalty : logit * penalty) < value;
  };
  int64_t high = std::bit_cast<int32_t>(-forbidden);
  int64_t low = -high;
  while (low < high) {
    const int64_t middle = (low + high) >> 1;
    if (is_below(static_cast<int32_t>(middle)))
      low = middle + 1;
    else
      high = middle;
  }
  known = {value, number(static_cast<int32_t>(low))};
  return known.logit;
}

void LogitBlocks::weigh(std::span<const float> values, double least, double* weights) const {
  cpu::ChoiceScale scale = scale_;
  scale.least = std::max(scale.least, least);
  (rough_ ? kernels_.weigh_logits_roughly : kernels_.weigh_logits)(values.data(), static_cast<int64_t>(values.size()),
                                                                   scale, {}, weights, nullptr);
}

void LogitBlocks::weigh(std::span<const double> values, double* weights) const {
  (rough_ ? kernels_.weigh_values_roughly : kernels_.weigh_values)(values.data(), static_cast<int64_t>(values.size()),
                                                                   scale_, {}, weights, nullptr);
}

void LogitBlocks::spread_weights() {
  (rough_ ? kernels_.weigh_values_roughly : kernels_.weigh_values)(wide_.data(), choice_block, scale_, {},
                                                                   weights_.data(), nullptr);
}

}  // namespace moeflux
