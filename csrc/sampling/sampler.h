// Which token comes next: the model's logits, changed as asked, and one random number a token.
//
// The order never varies: bias, penalties, what is allowed, temperature, top-k, top-p, min-p. What is left is summed up
// in the order of the ids, and the first token whose sum exceeds the random number is taken. The same logits and the
// same seed give the same tokens with every instruction set; python/moeflux/oracle/sampling.py is the definition.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "sampling/philox.h"

namespace moeflux {

// How tokens are chosen. As it stands: always the likeliest.
struct Sampling {
  double temperature = 0;         // 0: the likeliest; below 1 more of the likely, above 1 more of the others
  int64_t top_k = 0;              // only the k likeliest; 0: all
  double top_p = 1;               // only the likeliest that together have this probability
  double min_p = 0;               // only those with this share of the likeliest one's probability
  double repetition_penalty = 1;  // divides logits of tokens that are in the prompt or the answer
  double presence_penalty = 0;    // taken from logits of tokens that are in the answer
  double frequency_penalty = 0;   // the same, for every time they are
  std::vector<std::pair<int32_t, double>> logit_bias;  // added to the logits of ids; -inf forbids one
  uint64_t seed = 0;                                   // of the random numbers
};

class Changes;
class Chooser;
class ShortChooser;
struct Shortlist;

struct LogProbability {
  int32_t token = 0;
  double value = 0;
};

// By the model alone: nothing that `Sampling` asks for is in them. Within 1e-9.
struct LogProbabilities {
  double of_token = 0;  // of the one that was chosen
  // The likeliest tokens, best first: as many as there is room for when it is given, at most `max_log_probabilities`,
  // and fewer when others are impossible.
  std::vector<LogProbability> best;
};

constexpr int64_t max_log_probabilities = 1024;

// Chooses the tokens of one answer, and counts them for the penalties. All the memory that it needs is taken when it is
// made. It has one caller at a time; a second gets StateError.
class Sampler {
 public:
  // ArgumentError for what cannot be: settings out of range, tokens that the vocabulary does not have. `isa` as in
  // EngineOptions; it changes no token.
  Sampler(const Sampling& sampling, int64_t vocab_size, std::span<const int32_t> prompt, const std::string& isa = "");
  ~Sampler();
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;

  // The next token. `logits` [vocab]; -inf stands for a token that is never taken. `allowed`, when not empty, has a bit
  // for each token, bit i of word w for token 32 * w + i: those of 0 are not taken this time. ArgumentError when no
  // token is left, or a logit is no number: nothing was chosen then.
  int32_t choose(std::span<const float> logits, std::span<const uint32_t> allowed = {},
                 LogProbabilities* log_probabilities = nullptr);

  // The next token by a device's shortlist, while all are allowed and nobody asks for log probabilities: the one that
  // `choose` takes. Nothing, and nothing was chosen, where the list does not tell. The factor is that of the list; 0
  // where none will do, because all logits are looked at.
  double shortlist_factor() const;
  std::optional<int32_t> choose(const Shortlist& list);
  int64_t chosen_from_shortlists() const { return from_shortlists_; }

  // Whether it takes the likeliest token whenever all are allowed. Whoever knows that one need not ask then.
  bool is_greedy() const;
  int64_t vocab_size() const { return vocab_size_; }

  // Of memory; and the most that one of such a vocabulary has, but for biases.
  int64_t bytes() const;
  static int64_t max_bytes(int64_t vocab_size);

 private:
  class Use;

  void check(std::span<const float> logits, std::span<const uint32_t> allowed,
             const LogProbabilities* log_probabilities) const;
  void check_left() const;
  void find_likeliest(LogProbabilities& wanted);

  Sampling sampling_;
  int64_t vocab_size_;
  std::unique_ptr<Changes> changes_;
  std::unique_ptr<Chooser> chooser_;
  std::unique_ptr<ShortChooser> short_chooser_;
  Philox random_;
  int64_t from_shortlists_ = 0;
  std::atomic<bool> busy_ = false;
};

}  // namespace moeflux
