#include "sampling/short_chooser.h"

#include <algorithm>
#include <cmath>

namespace moeflux {

namespace {

constexpr int64_t room = std::max(most_listed, shortlist_block);

float greatest_of(const Shortlist& list) {
  return std::ranges::max_element(list.blocks, {}, &ShortlistBlock::greatest)->greatest;
}

// What is 2^((block's greatest - greatest) * factor)?
double share_of(const ShortlistBlock& block, float greatest, double factor) {
  return std::exp2((double{block.greatest} - double{greatest}) * factor);
}

}  // namespace

ShortChooser::ShortChooser(const cpu::ChoiceKernels& kernels) : chooser_(kernels, room), values_(room) {}

void ShortChooser::take(std::span<const float> logits) {
  std::ranges::fill(std::ranges::copy(logits, values_.begin()).out, values_.end(), forbidden);
  chooser_.take(values_, nullptr, {});
}

std::optional<int32_t> ShortChooser::draw(const Shortlist& list, const Sampling& sampling, double uniform) {
  const auto count = static_cast<int64_t>(list.tokens.size());
  const bool has_top_k = sampling.top_k > 0 && sampling.top_k < list.vocab_size;
  if (!has_top_k && sampling.top_p == 1 && sampling.min_p == 0) return draw_from_all(list, sampling, uniform);
  if (count == 0 || (has_top_k && count < sampling.top_k)) return std::nullopt;
  const float greatest = greatest_of(list);
  take(list.logits);
  Chooser::Others others;
  if (!has_top_k && !list.is_whole()) {
    for (const ShortlistBlock& block : list.blocks) others.sum += block.sum * share_of(block, greatest, list.factor);
    others.all_below = *std::ranges::min_element(list.logits);
  }
  Sampling own = sampling;
  if (!has_top_k) own.top_k = 0;
  const std::optional<int32_t> place = chooser_.draw_surely(own, uniform, others);
  if (!place) return std::nullopt;
  return list.tokens[static_cast<size_t>(*place)];
}

// What every block weighs tells in which of them the draw ends, and its logits tell where.
std::optional<int32_t> ShortChooser::draw_from_all(const Shortlist& list, const Sampling& sampling, double uniform) {
  const float greatest = greatest_of(list);
  double total = 0;
  for (const ShortlistBlock& block : list.blocks) total += block.sum * share_of(block, greatest, list.factor);
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
