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
  StepStats stats;        // of the engine's last call before the token was chosen
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
  //
  // Where steps are made ahead, it gives what came of them since the last time, and waits for one, without an eye on
  // the interruption. It gives nothing when there is none because they were ended.
  std::vector<DecoderEvent> step(const Interruption& interruption = {});

  // Makes further steps before they are asked for, in a thread of its own. They end by themselves behind one that
  // brings anything but tokens. False, and there are none, where somebody has to do something between steps: when a
  // prompt is read, or somebody answers who is masked or has one token a step. Until all that came of them was taken,
  // no session or sampler of a request may be used.
  bool go_ahead();
  // No further one is begun. `at_once`: the one under way is given up, where its sessions can go back.
  void end_ahead(bool at_once = false);
  // Whether there is one, or something came of one that `step` has not given yet.
  bool is_ahead() const;

 private:
  class Ahead;
  class Step;
  struct Running;
  using Requests = std::vector<std::unique_ptr<Running>>;

  void check(const Request& request) const;
  Running* find(int64_t id) const;
  bool can_go_ahead() const;
  std::vector<DecoderEvent> step_now(const Interruption& interruption);
  void let_go();

  std::shared_ptr<Engine> engine_;
  int64_t rows_;
  std::atomic<int64_t> prompt_rows_;
  uint64_t served_ = 0;  // how often any request has been evaluated for

  mutable std::mutex mutex_;  // guards the rest, and what others hand to a request
  Requests requests_;         // by ascending id
  int64_t ids_ = 0;
  bool stepping_ = false;
  std::unique_ptr<Running> gone_;  // is over, as those behind it, and goes in a thread that calls the decoder

  std::unique_ptr<Ahead> ahead_;  // the last, for it uses all of this
};

}  // namespace moeflux
