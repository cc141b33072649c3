// Decides by measuring how many tokens to draft, and whether drafts pay.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <optional>

#include "core/choices.h"
#include "engine/draft_policy.h"

namespace moeflux {

// It watches a window of calls without drafts, then tries a window of calls with them, the first of these with as many
// as there can be. From then on it knows what calls take and how often drafts come true, and drafts as many as bring
// most tokens a second by that. When those bring no more than none do, there are no drafts for a rest, each longer than
// the last, and so long that what the window has lost is little beside it. Otherwise drafts stay on; each window
// decides anew. After a while, or when calls no longer take what they took, all is measured anew. Where a text suggests
// no drafts, there is nothing to decide. May be used from several threads.
class DraftGovernor {
 public:
  // A call that evaluated one token for each of so many sessions, and drafts.
  struct Call {
    double seconds = 0;
    int64_t tokens = 0;
    int64_t drafted = 0;
  };

  explicit DraftGovernor(Speculate mode) : mode_(mode) {}

  // How many a session is to draft at most, of whose last drafts one fewer than `longest` came true. Where nobody
  // measures these are `longest`: a wrong draft costs a row.
  int64_t drafts(int64_t longest) const;
  // What the last decision was; nothing before the first.
  std::optional<bool> pays() const;
  void add(const Call& call);
  // So many of a session's drafts came true and then, if there were more, one did not. `longest` is what `drafts` was
  // given for them.
  void add_outcome(int64_t longest, int64_t drafted, int64_t came);

 private:
  enum class State { watching, trying, kept, resting };

  // What the last calls took, without those that took longest: other programs ran then.
  class Times {
   public:
    void add(double seconds);
    std::optional<double> typical() const;

   private:
    static constexpr int64_t room = 16;
    static constexpr int64_t few = 2;
    std::array<double, room> last_ = {};
    int64_t count_ = 0;
  };

  // How often things happened of late.
  class Share {
   public:
    explicit Share(double kept) : kept_(kept) {}
    void add(bool happened);
    // With two more, of which so many happened.
    double value(double otherwise) const { return (happened_ + 2 * otherwise) / (all_ + 2); }
    // They are worth no more than so many.
    void limit(double number);

   private:
    double kept_;  // of what was before, each time
    double happened_ = 0;
    double all_ = 0;
  };

  static constexpr double memory = 0.98;
  static constexpr double short_memory = 0.95;

  // Of drafts after some that came true, or after a wrong one: text that repeats what was there does so for a while.
  struct Drafting {
    std::array<Share, max_drafts> came = {Share(memory), Share(memory), Share(memory), Share(memory)};
    int64_t drafts = max_drafts;

    DraftChances chances() const;
  };

  static size_t kind(int64_t longest) { return longest > 1 ? 1 : 0; }
  bool is_on() const { return state_ == State::trying || state_ == State::kept; }
  DraftSeconds seconds() const;
  void choose(const DraftSeconds& seconds);
  int64_t calls_lost(const DraftSeconds& seconds) const;
  bool has_moved(const DraftSeconds& seconds) const;
  void decide();
  void enter(State state);

  const Speculate mode_;
  mutable std::mutex mutex_;  // guards the rest
  State state_ = State::watching;
  bool settled_ = false;  // there was a call since the last change, whose first call is not typical
  int64_t calls_ = 0;     // since then
  int64_t counted_ = 0;   // of the window
  int64_t company_ = 0;   // sessions, in the calls that are compared
  // Of the window: calls with so many drafts, and tokens that came of them.
  std::array<int64_t, 1 + max_drafts> made_ = {};
  int64_t said_ = 0;
  std::array<Times, 1 + max_drafts> times_;
  DraftSeconds known_ = {};  // what they said when it was decided to keep drafting
  std::array<Drafting, 2> drafting_;
  Share follows_right_{short_memory};  // drafts after some that came true, among all
  int64_t rest_ = 0;                   // calls; how long the next one is
  std::optional<bool> pays_;
};

}  // namespace moeflux
