// The look-ahead: experts that the next layer will likely pick are read while this one computes.
//
// The next layer's norm and router, applied to this layer's hidden state before its experts have added theirs, guess
// which. The guess is computed in the submission of this layer's own routing, so that nobody waits for it; reads begin
// behind all that is demanded, into slots that nothing else needs, and end at once when something does. When the next
// layer's router has spoken, its choice is compared with the guess as a set. A guess changes what lies in which slot
// and when: not one bit of a result.
//
// For steps of one token. Prefill needs most experts of a layer anyway.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/variant.h"
#include "engine/expert_groups.h"
#include "engine/scratch.h"
#include "io/expert_loader.h"
#include "moeflux.h"

namespace moeflux {

enum class LookAhead { automatic, on, off };

// Whether looking ahead pays, by trying. It watches a window of steps without: how long they take, how much of that
// they stand still for reads, how long the disk is idle. Where there is waiting to save and a disk with time to save
// it, the next window looks ahead. When that was faster it is kept on for a while and then compared again; when not, it
// stays off for a rest, each longer than the last.
class LookAheadGovernor {
 public:
  struct Step {
    double seconds = 0;
    double wait_seconds = 0;  // of them, standing still for reads
    double busy_seconds = 0;  // of them, with a read under way
  };

  explicit LookAheadGovernor(LookAhead mode) : mode_(mode) {}

  bool on() const;
  // A step of one token has ended, made with `on()` as it is.
  void add(const Step& step);

 private:
  enum class State { watching, trying, kept, resting };

  void end_window();
  void enter(State state);

  LookAhead mode_;
  State state_ = State::watching;
  int64_t steps_ = 0;   // in this state
  Step sum_;            // of the window
  double without_ = 0;  // seconds of the last window without
  int64_t rest_ = 0;    // steps; how long the next one is
};

class Prefetcher {
 public:
  Prefetcher(const Variant& variant, LookAhead mode);

  // Whether a call of n tokens looks ahead from `layer`.
  bool looks_ahead(int64_t layer, int64_t n) const;

  // Reads what scratch.guess_ids name for layer + 1.
  void begin(ExpertLoader& loader, int64_t layer, const Scratch& scratch, StepStats& stats);
  // The router of `layer` has spoken: what was guessed and not picked is no longer wanted.
  void compare(ExpertLoader& loader, int64_t layer, std::span<const ExpertGroups::Group> picked, StepStats& stats);
  // A call failed: nothing is guessed any more.
  void forget() { guessed_.clear(); }

  LookAheadGovernor& governor() { return governor_; }

 private:
  LookAheadGovernor governor_;
  std::vector<bool> has_experts_;  // [layer]
  int64_t experts_per_token_;
  std::vector<int32_t> guessed_;  // experts of the next layer whose reads were begun
};

}  // namespace moeflux
