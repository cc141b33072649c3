// The look-ahead: experts that the next layer will likely pick are read while this one computes.
//
// The guess comes from the next layer's norm and router, applied to this layer's hidden state before its experts have
// added their outputs. It is computed in the submission of this layer's own routing, so nobody waits for it. Its reads
// begin after all demanded ones, go into slots that nothing else needs, and end at once when something does. When the
// next layer's router has spoken, its choice is compared with the guess as a set. A guess changes which expert lies in
// which slot and when, but not one bit of a result.
//
// A call of many tokens asks the next router for the first of them only (`max_guess_rows`): other tokens pick the same
// experts, so hardly anything is read for nothing. Its guessed reads begin as this layer's experts leave their slots,
// so that the disk works on while the next layer attends.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/lists.h"
#include "engine/blocks/routed_experts.h"
#include "engine/experts/expert_groups.h"
#include "io/expert_loader.h"
#include "models/variant.h"
#include "moeflux.h"

namespace moeflux {

// Decides by trying whether looking ahead pays. It watches a window of steps without look-ahead: how long they take,
// how long they stand still for reads, how long the disk is idle. If there is waiting to save and the disk has time for
// it, the next window looks ahead. If that was faster, look-ahead stays on for a while and is then compared again. If
// not, it stays off for a rest, each longer than the last.
class LookAheadGovernor {
 public:
  struct Step {
    double seconds = 0;
    double wait_seconds = 0;  // the part of them that stands still for reads
    double busy_seconds = 0;  // the part of them with a read under way
  };

  explicit LookAheadGovernor(LookAhead mode) : mode_(mode) {}

  bool on() const;
  // What the last comparison has found; nothing before the first.
  std::optional<bool> pays() const { return pays_; }
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
  double without_ = 0;  // seconds of the last window without look-ahead
  int64_t rest_ = 0;    // steps; how long the next one is
  std::optional<bool> pays_;
};

// The same for calls of several tokens, whose lengths differ too much to be compared. They look ahead unless the last
// one read nothing, or a quarter of its guesses was wrong. Then some calls do without, more after each further failure.
class PrefillGovernor {
 public:
  struct Call {
    int64_t misses = 0;
    int64_t guesses = 0;
    int64_t guesses_used = 0;
  };

  explicit PrefillGovernor(LookAhead mode) : mode_(mode) {}

  bool on() const { return mode_ == LookAhead::automatic ? rest_ == 0 : mode_ == LookAhead::on; }
  // A call has ended, made with `on()` as it is.
  void add(const Call& call);

 private:
  LookAhead mode_;
  int64_t rest_ = 0;  // calls still to do without
  int64_t last_rest_ = 0;
};

class Prefetcher {
 public:
  Prefetcher(const Variant& variant, LookAhead mode);
  static int64_t planned_tables(int64_t experts) { return planned_bytes<Lists>(experts); }
  int64_t tables() const { return held_bytes(lists_); }

  // How many of a call's n tokens the guess for layer + 1 is made from; 0 if there is no guess.
  int64_t rows(int64_t layer, int64_t n) const;

  // Takes the experts that `rows` tokens would pick in the next layer, as its router has guessed.
  void propose(const RoutedExpertsBlock& next, int64_t rows);
  // Begins to read guessed experts for which there are slots. There are none while `layer` has more to read, which
  // takes all. Reads for a single token begin at once or never. `from_files`: experts in slots below stay there.
  void begin(ExpertLoader& loader, int64_t layer, StepStats& stats, bool from_files = false);
  // Whether there are more reads to begin, once there are slots.
  bool wants_more() const { return next_ < lists_.proposed.size(); }
  // The router of `layer` has spoken. Drops what was guessed and not picked.
  void compare(ExpertLoader& loader, int64_t layer, std::span<const ExpertGroups::Group> picked, StepStats& stats);
  // A call has failed. Drops all guesses.
  void forget();

  // A call of n tokens has ended.
  void add(int64_t n, const LookAheadGovernor::Step& step, StepStats& stats);

 private:
  struct Lists {
    std::vector<uint8_t> seen;      // [expert]: proposed
    std::vector<int32_t> proposed;  // experts of the next layer, the likeliest first
    std::vector<int32_t> guessed;   // whose reads were begun

    template <typename Self, typename Visit>
    static void each(Self& lists, int64_t experts, const Visit& visit) {
      visit(lists.seen, experts);
      visit(lists.proposed, experts);
      visit(lists.guessed, experts);
    }
  };

  LookAheadGovernor governor_;
  PrefillGovernor prefill_governor_;
  std::vector<bool> has_experts_;  // [layer]
  int64_t experts_per_token_;
  Lists lists_;
  int64_t rows_ = 0;  // how many the proposal was made from
  size_t next_ = 0;   // which of the proposed experts is to be begun next
};

}  // namespace moeflux
