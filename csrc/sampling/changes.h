// What is done to logits before the temperature: biases, and penalties of tokens that were there before.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "sampling/sampler.h"

namespace moeflux {

namespace cpu {
struct ChoiceKernels;
}

class Changes {
 public:
  // Tokens of the biases and of the prompt are of the vocabulary.
  Changes(const Sampling& sampling, int64_t vocab_size, std::span<const int32_t> prompt);

  bool none() const { return bias_.empty() && repetition_ == 1 && presence_ == 0 && frequency_ == 0; }
  bool any(int64_t block) const { return touched_[static_cast<size_t>(block)]; }
  // One more token of the answer.
  void count(int32_t token);
  // To the values of a block.
  void apply(const cpu::ChoiceKernels& kernels, int64_t block, double* values) const;

  int64_t bytes() const;

 private:
  void touch(int32_t token);
  bool is_quick(int64_t block, const double* values) const;

  double repetition_;
  double presence_;
  double frequency_;
  std::vector<std::pair<int32_t, double>> bias_;  // ascending
  std::vector<size_t> first_bias_;                // of each block, then their number
  std::vector<uint32_t> seen_;                    // bit sets: tokens of the prompt or the answer
  std::vector<uint32_t> answered_;                // of the answer
  std::vector<bool> touched_;                     // is there anything to do in a block?
  std::vector<uint32_t> times_;                   // how often a token is in the answer
};

}  // namespace moeflux
