// Requests that are answered side by side. One call is one step for all of them: their next tokens are evaluated
// together, and the tokens after those are chosen. No answer depends on its company.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/interruption.h"
#include "moeflux.h"

namespace moeflux {

// An answer that is wanted.
struct Request {
  Session* session = nullptr;   // has the request's own way to go: nobody else uses it until the request is over
  Sampler* sampler = nullptr;   // the same holds for this
  std::shared_ptr<void> owner;  // keeps both alive; let go when the request is over
  std::vector<int32_t> tokens;  // of the prompt, that the session does not have yet; none: it has logits
  std::vector<int32_t> stop_tokens;
  int64_t max_tokens = 1;
  std::optional<int64_t> log_probabilities;  // of so many of the likeliest, and of the token
  std::vector<int64_t> borders;              // positions in the prompt where a checkpoint is made
  bool masked = false;                       // waits for `set_mask` before each choice
  bool stepwise = false;                     // has one token a step, because its maker may end it after any
};

// What a step did for one request. There are several of one for which several tokens were chosen.
struct DecoderEvent {
  int64_t id = 0;
  std::optional<int32_t> token;  // that was chosen
  std::optional<double> log_probability;
  std::vector<LogProbability> likeliest;
  std::string finish;  // "end", "length", "context" or "failed"; empty: it goes on
  // Why it failed. Of a request that goes on "budget": there was no memory for its rows, and it is tried again.
  std::string error;
  int64_t evaluated = 0;  // tokens of the prompt
};

class Decoder {
 public:
  // `rows`: the most tokens of one step, at least 2; 0: as many as the engine evaluates at once.
  Decoder(std::shared_ptr<Engine> engine, int64_t rows);
  ~Decoder();
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  int64_t rows() const { return rows_; }
  // How many tokens of a step prompts may take together, the oldest request first, while others go on with their
  // answers. Where nobody does, they take all. 0: they wait.
  int64_t prompt_rows() const { return prompt_rows_.load(std::memory_order_relaxed); }
  void set_prompt_rows(int64_t rows);

  // What follows may be called from any thread, also during a step.

  // Returns the request's id; later ones are greater. ArgumentError for what cannot be.
  int64_t add(Request request);
  // For one choice of a masked request: as Sampler::choose has it, none: everything is allowed.
  void set_mask(int64_t id, std::optional<std::span<const uint32_t>> allowed);
  // No event tells of the request any more. Returns whether its session is free; otherwise it is when the step under
  // way is over. Nothing happens for a request that is over.
  bool remove(int64_t id);

  // What became of each request that got further, by ascending id; nothing when none could. A request gets a token, and
  // more as long as its session foresees them, which costs nothing. A request whose session
  // fails ends, and the others go on. What throws leaves every request where it was; tokens that were chosen are told
  // of by the next step. StateError when another thread is at a step.
  std::vector<DecoderEvent> step(const Interruption& interruption = {});

 private:
  class Step;
  struct Running;
  using Requests = std::vector<std::unique_ptr<Running>>;

  void check(const Request& request) const;
  Running* find(int64_t id) const;
  Requests take_over();

  std::shared_ptr<Engine> engine_;
  int64_t rows_;
  std::atomic<int64_t> prompt_rows_;
  uint64_t served_ = 0;  // how often any request has been evaluated for

  mutable std::mutex mutex_;  // guards the rest, and what others hand to a request
  Requests requests_;         // by ascending id
  int64_t ids_ = 0;
  bool stepping_ = false;
};

}  // namespace moeflux
