// What is done to logits before the temperature: biases, and penalties of tokens that were there before.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/cpu/choice.h"
#include "sampling/sampler.h"

namespace moeflux {

// What lists have room for, block by block: all tokens, and so much more that the beginnings of the lists, which mostly
// are all that there is, fall into different sets of the caches.
constexpr int64_t changed_room = cpu::choice_block + 2 * cpu::choice_columns;

// Tokens with a bias and those of the answer are lists, block by block. Those of the prompt have the repetition
// penalty: where they are many they are bits, unless they are in a list too, which says all that is done to a token.
// The others keep their logits.
class Changes {
 public:
  // Tokens of the biases and of the prompt are of the vocabulary.
  Changes(const Sampling& sampling, int64_t vocab_size, std::span<const int32_t> prompt);

  bool none() const { return none_; }
  // Whether no value is greater than its logit.
  bool only_lower() const;
  // What becomes of a logit.
  double value(int32_t token, float logit) const;
  // One more token of the answer.
  void count(int32_t token);
  bool any(int64_t block) const { return seen(block) || counts_[static_cast<size_t>(block)] > 0; }
  // Bit sets: which tokens of a block have the repetition penalty alone, null: none; and to which nothing is done.
  const uint32_t* seen(int64_t block) const {
    return any_seen_[static_cast<size_t>(block)] ? seen_.data() + block * cpu::choice_words : nullptr;
  }
  const uint32_t* left_alone(int64_t block) const { return left_alone_.data() + block * cpu::choice_words; }
  // The lists of a block, ascending.
  cpu::ChangedPlaces of(int64_t block) const;
  // Brings the lists of a block nearer, if there is one.
  void fetch(int64_t block) const;
  const cpu::Penalties& penalties() const { return penalties_; }

  int64_t bytes() const;

 private:
  bool is_seen(int32_t token) const { return (seen_[static_cast<size_t>(token / 32)] >> (token % 32) & 1) != 0; }
  void see(std::span<const int32_t> prompt);
  size_t entry(int32_t token, int32_t times);

  cpu::Penalties penalties_;
  bool has_penalties_;
  bool none_;
  std::vector<uint32_t> seen_;
  std::vector<uint8_t> any_seen_;  // of each block
  std::vector<uint32_t> left_alone_;
  std::vector<int32_t> counts_;  // of each block
  // Of each block one behind the other, with room for all its tokens. Memory is touched as far as there are some.
  size_t room_;
  std::unique_ptr<int32_t[]> places_;
  std::unique_ptr<int32_t[]> times_;
  std::unique_ptr<double[]> biases_;  // null: none
};

}  // namespace moeflux
