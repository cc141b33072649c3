#include "sampling/short_chooser.h"

#include <algorithm>
#include <cmath>

namespace moeflux {

namespace {

constexpr int64_t room = std::max(most_listed, shortlist_block);

float greatest_of(const Shortlist& list) {
  return std::ranges::max_element(list.blocks, {}, &ShortlistBlock::greatest)->greatest;
}

bool cuts_by_number(const Sampling& sampling, int64_t vocab_size) {
  return sampling.top_k > 0 && sampling.top_k < vocab_size;
}

// What is 2^((block's greatest - greatest) * factor)?
double share_of(const ShortlistBlock& block, float greatest, double factor) {
  return std::exp2((double{block.greatest} - double{greatest}) * factor);
}

// What all logits weigh, beside the greatest.
double weight_of_all(const Shortlist& list, float greatest) {
  double sum = 0;
  for (const ShortlistBlock& block : list.blocks) sum += block.sum * share_of(block, greatest, list.factor);
  return sum;
}

}  // namespace

ShortChooser::ShortChooser(const cpu::ChoiceKernels& kernels)
    : kernels_(kernels),
      chooser_(kernels, room),
      values_(room),
      changed_(most_listed, room),
      best_(most_listed, room) {}

// Penalties change sums by logits that are not listed, and numbers only by those that are.
bool ShortChooser::takes(const Sampling& sampling, const Changes& changes, int64_t vocab_size) {
  if (sampling.temperature == 0) return false;
  return changes.none() ||
         (changes.only_lower() && cuts_by_number(sampling, vocab_size) && sampling.top_k <= most_listed);
}

void ShortChooser::take(std::span<const float> logits) {
  std::ranges::fill(std::ranges::copy(logits, values_.begin()).out, values_.end(), forbidden);
  chooser_.take(values_, nullptr, {});
}

std::optional<int32_t> ShortChooser::draw(const Shortlist& list, const Sampling& sampling, const Changes& changes,
                                          double uniform) {
  if (!takes(sampling, changes, list.vocab_size)) return std::nullopt;
  if (!changes.none()) return draw_changed(list, sampling, changes, uniform);
  const auto count = static_cast<int64_t>(list.tokens.size());
  const bool has_top_k = cuts_by_number(sampling, list.vocab_size);
  if (!has_top_k && sampling.top_p == 1 && sampling.min_p == 0) return draw_from_all(list, sampling, uniform);
  if (count == 0 || (has_top_k && count < sampling.top_k)) return std::nullopt;
  const float greatest = greatest_of(list);
  take(list.logits);
  Chooser::Others others;
  if (!has_top_k && !list.is_whole()) {
    others.sum = weight_of_all(list, greatest);
    others.all_below = *std::ranges::min_element(list.logits);
  }
  Sampling own = sampling;
  if (!has_top_k) own.top_k = 0;
  const std::optional<int32_t> place = chooser_.draw_surely(own, uniform, others);
  if (!place) return std::nullopt;
  return list.tokens[static_cast<size_t>(*place)];
}

// The best by number. What is not listed is less than its logit, at most, and that is less than what is listed.
std::optional<int32_t> ShortChooser::draw_changed(const Shortlist& list, const Sampling& sampling,
                                                  const Changes& changes, double uniform) {
  const size_t count = list.tokens.size();
  if (count < static_cast<size_t>(sampling.top_k)) return std::nullopt;
  changed_.clear();
  double* const values = changed_.values();
  for (size_t i = 0; i < count; ++i) {
    values[i] = changes.value(list.tokens[i], list.logits[i]);
    changed_.tokens()[i] = static_cast<int32_t>(i);
  }
  const auto [least, most] = std::minmax_element(values, values + count);
  const Bracket bracket = {*least, *most};
  if (!std::isfinite(bracket.least) || !std::isfinite(bracket.most)) return std::nullopt;
  changed_.end(0, count);
  const Cut cut = cut_list(kernels_, changed_.all(), bracket, static_cast<double>(sampling.top_k)).cut;
  if (!list.is_whole() && cut.value < *std::ranges::min_element(list.logits)) return std::nullopt;
  best_.clear();
  size_t kept = 0;
  for (size_t i = 0; i < count; ++i) {
    if (!cut.keeps(values[i], static_cast<int64_t>(i))) continue;
    best_.values()[kept] = values[i];
    best_.tokens()[kept++] = static_cast<int32_t>(i);
  }
  best_.end(0, kept);
  Sampling own = sampling;
  own.top_k = 0;
  chooser_.take_listed(best_.of(0));
  const std::optional<int32_t> place = chooser_.draw_surely(own, uniform, {});
  if (!place) return std::nullopt;
  return list.tokens[static_cast<size_t>(*place)];
}

// What every block weighs tells in which of them the draw ends, and its logits tell where.
std::optional<int32_t> ShortChooser::draw_from_all(const Shortlist& list, const Sampling& sampling, double uniform) {
  const float greatest = greatest_of(list);
  const double total = weight_of_all(list, greatest);
  const double goal = uniform * total;
  double before = 0;
  for (size_t i = 0; i < list.blocks.size(); ++i) {
    const double share = share_of(list.blocks[i], greatest, list.factor);
    const double sum = list.blocks[i].sum * share;
    if (before + sum <= goal) {
      before += sum;
      continue;
    }
    take(list.read_block(static_cast<int64_t>(i)));
    const std::optional<int32_t> place =
        chooser_.first_beyond(sampling.temperature, (goal - before) / share, total / share);
    if (!place) return std::nullopt;
    return static_cast<int32_t>(static_cast<int64_t>(i) * shortlist_block) + *place;
  }
  return std::nullopt;
}

}  // namespace moeflux
