// Decides by trying whether drafts pay: whether tokens come faster with them.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>

#include "core/choices.h"

namespace moeflux {

// It watches a window of calls without drafts, then one of calls with them. If tokens came faster, drafts stay on. From
// then on each window is compared with the one that was watched, and after a while that is watched anew. If tokens came
// no faster, there are no drafts for a rest, each longer than the last. Where a text suggests no drafts, there is
// nothing to decide. May be used from several threads.
class DraftGovernor {
 public:
  // A call that evaluated one token for each of so many sessions, and drafts.
  struct Call {
    double seconds = 0;
    int64_t tokens = 0;
    int64_t drafted = 0;
  };

  explicit DraftGovernor(Speculate mode) : mode_(mode) {}

  bool on() const;
  // What the last comparison has found; nothing before the first.
  std::optional<bool> pays() const;
  void add(const Call& call);
  // So many drafts of calls before have come true.
  void accept(int64_t tokens);

 private:
  enum class State { watching, trying, kept, resting };

  // Of a window.
  struct Sum {
    int64_t calls = 0;
    int64_t tokens = 0;
    double seconds = 0;
    double rate() const { return static_cast<double>(tokens) / seconds; }
  };

  bool drafts() const { return state_ == State::trying || state_ == State::kept; }
  void compare();
  void enter(State state);

  const Speculate mode_;
  mutable std::mutex mutex_;  // guards the rest
  State state_ = State::watching;
  bool settled_ = false;  // there was a call since the last change, whose first call is not typical
  int64_t calls_ = 0;     // since then
  int64_t company_ = 0;   // sessions, in the calls that are compared
  Sum sum_;
  double without_ = 0;  // tokens a second
  int64_t rest_ = 0;    // calls; how long the next one is
  std::optional<bool> pays_;
};

}  // namespace moeflux
