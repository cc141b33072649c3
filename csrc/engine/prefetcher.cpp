#include "engine/prefetcher.h"

#include <algorithm>

namespace moeflux {

// ---- LookAheadGovernor ----------------------------------------------------------------------------------------------

namespace {

constexpr int64_t window = 16;  // steps
constexpr int64_t kept_for = 512;
constexpr int64_t shortest_rest = 64;
constexpr int64_t longest_rest = 4096;

constexpr double worth_saving = 0.05;  // of the time, standing still for reads
constexpr double enough_idle = 0.05;   // of the time, the disk
constexpr double gain = 0.98;          // of the time without; a smaller one may be noise

}  // namespace

bool LookAheadGovernor::on() const {
  if (mode_ != LookAhead::automatic) return mode_ == LookAhead::on;
  return state_ == State::trying || state_ == State::kept;
}

void LookAheadGovernor::add(const Step& step) {
  if (mode_ != LookAhead::automatic) return;
  ++steps_;
  if (state_ == State::kept || state_ == State::resting) {
    if (steps_ >= (state_ == State::kept ? kept_for : rest_)) enter(State::watching);
    return;
  }
  if (steps_ == 1) return;  // what has just changed must settle
  sum_.seconds += step.seconds;
  sum_.wait_seconds += step.wait_seconds;
  sum_.busy_seconds += step.busy_seconds;
  if (steps_ == window + 1) end_window();
}

void LookAheadGovernor::end_window() {
  if (state_ == State::watching) {
    without_ = sum_.seconds;
    const double idle = sum_.seconds - sum_.busy_seconds;
    const bool could_pay = sum_.wait_seconds > worth_saving * sum_.seconds && idle > enough_idle * sum_.seconds;
    enter(could_pay ? State::trying : State::watching);
  } else if (sum_.seconds < gain * without_) {
    rest_ = 0;
    enter(State::kept);
  } else {
    rest_ = std::clamp(2 * rest_, shortest_rest, longest_rest);
    enter(State::resting);
  }
}

void LookAheadGovernor::enter(State state) {
  state_ = state;
  steps_ = 0;
  sum_ = {};
}

// ---- Prefetcher -----------------------------------------------------------------------------------------------------

Prefetcher::Prefetcher(const Variant& variant, LookAhead mode)
    : governor_(mode), experts_per_token_(variant.experts_per_token) {
  for (int64_t layer = 0; layer < variant.num_layers(); ++layer) has_experts_.push_back(variant.is_moe(layer));
  guessed_.reserve(static_cast<size_t>(experts_per_token_));
}

bool Prefetcher::looks_ahead(int64_t layer, int64_t n) const {
  const auto next = static_cast<size_t>(layer) + 1;
  return n == 1 && governor_.on() && next < has_experts_.size() && has_experts_[next];
}

void Prefetcher::begin(ExpertLoader& loader, int64_t layer, const Scratch& scratch, StepStats& stats) {
  // A layer's demand may need so many slots; a guess takes none of them.
  const int64_t keep = experts_per_token_;
  guessed_.clear();
  for (int64_t i = 0; i < experts_per_token_; ++i) {
    const int32_t expert = scratch.guess_ids.i32()[i];
    if (loader.guess(layer + 1, expert, keep)) guessed_.push_back(expert);
  }
  stats.look_ahead_reads += static_cast<int64_t>(guessed_.size());
}

void Prefetcher::compare(ExpertLoader& loader, int64_t layer, std::span<const ExpertGroups::Group> picked,
                         StepStats& stats) {
  for (const int32_t expert : guessed_) {
    const bool right = std::any_of(picked.begin(), picked.end(),
                                   [&](const ExpertGroups::Group& group) { return group.expert == expert; });
    // A right one may have been given up meanwhile, for its slot.
    if (right && loader.has(layer, expert))
      ++stats.look_ahead_used;
    else
      loader.dismiss(layer, expert);
  }
  guessed_.clear();
}

}  // namespace moeflux
