#include "sampling/changes.h"

#include <algorithm>
#include <bit>
#include <cstddef>

#include "kernels/cpu/choice.h"
#include "sampling/cut.h"

namespace moeflux {

using cpu::choice_block;
using cpu::choice_words;

Changes::Changes(const Sampling& sampling, int64_t vocab_size, std::span<const int32_t> prompt)
    : repetition_(sampling.repetition_penalty),
      presence_(sampling.presence_penalty),
      frequency_(sampling.frequency_penalty),
      bias_(sampling.logit_bias) {
  const auto blocks = static_cast<size_t>(cpu::choice_blocks(vocab_size));
  touched_.resize(blocks);
  std::sort(bias_.begin(), bias_.end());
  for (size_t block = 0; block <= blocks; ++block) {
    const auto first = std::lower_bound(bias_.begin(), bias_.end(), static_cast<int64_t>(block) * choice_block,
                                        [](const auto& bias, int64_t id) { return bias.first < id; });
    first_bias_.push_back(static_cast<size_t>(first - bias_.begin()));
  }
  if (repetition_ != 1) seen_.resize(blocks * choice_words);
  if (presence_ != 0 || frequency_ != 0) {
    answered_.resize(blocks * choice_words);
    times_.resize(static_cast<size_t>(vocab_size));
  }
  for (const auto& [id, bias] : bias_) touch(id);
  if (seen_.empty()) return;
  for (const int32_t id : prompt) {
    seen_[static_cast<size_t>(id / 32)] |= 1u << (id % 32);
    touch(id);
  }
}

void Changes::touch(int32_t token) { touched_[static_cast<size_t>(token / choice_block)] = true; }

void Changes::count(int32_t token) {
  if (seen_.empty() && answered_.empty()) return;
  touch(token);
  const auto word = static_cast<size_t>(token / 32);
  if (!seen_.empty()) seen_[word] |= 1u << (token % 32);
  if (answered_.empty()) return;
  answered_[word] |= 1u << (token % 32);
  ++times_[static_cast<size_t>(token)];
}

void Changes::apply(const cpu::ChoiceKernels& kernels, int64_t block, double* values) const {
  const auto index = static_cast<size_t>(block);
  const int64_t first = block * choice_block;
  for (size_t i = first_bias_[index]; i < first_bias_[index + 1]; ++i)
    values[bias_[i].first - first] += bias_[i].second;
  if (!seen_.empty())
    kernels.penalize(values, seen_.data() + block * choice_words, repetition_, is_quick(block, values));
  if (answered_.empty()) return;
  for (int64_t word = 0; word < choice_words; ++word)
    for (uint32_t bits = answered_[index * choice_words + static_cast<size_t>(word)]; bits != 0; bits &= bits - 1) {
      const int64_t place = 32 * word + std::countr_zero(bits);
      values[place] -= presence_ + frequency_ * times_[static_cast<size_t>(first + place)];
    }
}

// Logits are as f32 has them, but for those with a bias.
bool Changes::is_quick(int64_t block, const double* values) const {
  const auto begin = bias_.begin();
  const auto index = static_cast<size_t>(block);
  return cpu::is_quick(repetition_) &&
         std::all_of(begin + static_cast<std::ptrdiff_t>(first_bias_[index]),
                     begin + static_cast<std::ptrdiff_t>(first_bias_[index + 1]), [&](const auto& bias) {
                       const double value = values[bias.first - block * choice_block];
                       return value <= 0 || cpu::is_quick(value);
                     });
}

int64_t Changes::bytes() const {
  return bytes_of(bias_, first_bias_, seen_, answered_, times_) + static_cast<int64_t>(touched_.size() / 8);
}

}  // namespace moeflux
