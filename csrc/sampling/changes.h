// What is done to logits before the temperature: biases, and penalties of tokens that were there before.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/cpu/choice.h"
#include "sampling/sampler.h"

namespace moeflux {

// The tokens to which something is done, block by block. The others, nearly all, keep their logits.
class Changes {
 public:
  // Tokens of the biases and of the prompt are of the vocabulary.
  Changes(const Sampling& sampling, int64_t vocab_size, std::span<const int32_t> prompt);

  bool none() const { return none_; }
  // One more token of the answer.
  void count(int32_t token);
  // Of a block, ascending.
  cpu::ChangedPlaces of(int64_t block) const;
  // A bit set: the others of a block.
  const uint32_t* unchanged(int64_t block) const { return unchanged_.data() + block * cpu::choice_words; }
  const cpu::Penalties& penalties() const { return penalties_; }

  int64_t bytes() const;

 private:
  void touch(int32_t token) { unchanged_[static_cast<size_t>(token / 32)] &= ~(1u << (token % 32)); }
  int64_t find(int32_t token) const;
  void insert(int64_t block, int64_t at, int32_t place, int32_t times);

  cpu::Penalties penalties_;
  bool has_penalties_;
  bool none_;
  std::vector<uint32_t> unchanged_;
  std::vector<int32_t> counts_;  // of each block
  // Of each block one behind the other, with room for all its tokens. Memory is touched as far as there are some.
  size_t room_;
  std::unique_ptr<int32_t[]> places_;
  std::unique_ptr<int32_t[]> times_;
  std::unique_ptr<double[]> biases_;  // null: none
};

}  // namespace moeflux
