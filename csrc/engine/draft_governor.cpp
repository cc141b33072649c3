#include "engine/draft_governor.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace moeflux {
namespace {

constexpr int64_t window = 16;  // calls
constexpr int64_t kept_for = 512;
constexpr int64_t shortest_rest = 64;
constexpr int64_t longest_rest = 4096;
constexpr double gain = 1.02;  // of the rate without drafts; a smaller gain may be noise

}  // namespace

bool DraftGovernor::on() const {
  if (mode_ != Speculate::automatic) return mode_ != Speculate::off;
  const std::lock_guard lock(mutex_);
  return drafts();
}

std::optional<bool> DraftGovernor::pays() const {
  if (mode_ != Speculate::automatic) return {};
  const std::lock_guard lock(mutex_);
  return pays_;
}

void DraftGovernor::accept(int64_t tokens) {
  if (mode_ != Speculate::automatic) return;
  const std::lock_guard lock(mutex_);
  if (drafts() && sum_.calls > 0) sum_.tokens += tokens;
}

void DraftGovernor::add(const Call& call) {
  if (mode_ != Speculate::automatic) return;
  const std::lock_guard lock(mutex_);
  // The drafts of a window's last call have come true, or not, before the next call.
  if (drafts() && sum_.calls == window) compare();
  if (std::abs(call.tokens - company_) > company_ / 4) {
    if (state_ != State::resting) enter(State::watching);
    company_ = call.tokens;
  }
  ++calls_;
  if (state_ == State::resting) {
    if (calls_ >= rest_) enter(State::watching);
    return;
  }
  if (state_ == State::kept && calls_ >= kept_for) return enter(State::watching);
  if (drafts() != (call.drafted > 0) || !std::exchange(settled_, true)) return;
  ++sum_.calls;
  sum_.tokens += call.tokens;
  sum_.seconds += call.seconds;
  if (state_ == State::watching && sum_.calls == window) {
    without_ = sum_.rate();
    enter(State::trying);
  }
}

void DraftGovernor::compare() {
  pays_ = sum_.rate() > gain * without_;
  if (!*pays_) {
    rest_ = std::clamp(2 * rest_, shortest_rest, longest_rest);
    return enter(State::resting);
  }
  rest_ = 0;
  sum_ = {};
  if (state_ == State::trying) enter(State::kept);
}

void DraftGovernor::enter(State state) {
  state_ = state;
  settled_ = false;
  calls_ = 0;
  sum_ = {};
}

}  // namespace moeflux
