#include "engine/experts/prefetcher.h"

#include <algorithm>
#include <utility>

namespace moeflux {

// ---- LookAheadGovernor ----------------------------------------------------------------------------------------------

namespace {

constexpr int64_t window = 16;  // steps
constexpr int64_t kept_for = 512;
constexpr int64_t shortest_rest = 64;
constexpr int64_t longest_rest = 4096;

constexpr double worth_saving = 0.05;  // share of the time that the call stands still for reads
constexpr double enough_idle = 0.05;   // share of the time that the disk is idle
constexpr double gain = 0.98;          // of the time without look-ahead; a smaller gain may be noise

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
  if (steps_ == 1) return;  // the first step after a change is not typical
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
    return;
  }
  pays_ = sum_.seconds < gain * without_;
  if (*pays_) {
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

// ---- PrefillGovernor ------------------------------------------------------------------------------------------------

namespace {

constexpr int64_t rest_without_reads = 4;  // calls
constexpr int64_t longest_prefill_rest = 64;

}  // namespace

void PrefillGovernor::add(const Call& call) {
  if (rest_ > 0) {
    --rest_;
    return;
  }
  if (call.misses + call.guesses == 0) {
    rest_ = rest_without_reads;
  } else if (4 * call.guesses_used < 3 * call.guesses) {
    rest_ = last_rest_ = std::clamp<int64_t>(2 * last_rest_, 1, longest_prefill_rest);
  } else {
    last_rest_ = 0;
  }
}

// ---- Prefetcher -----------------------------------------------------------------------------------------------------

// A guess for one token is often wrong. Reads come in parts, so that it can be given up at the end of one.
constexpr int64_t single_parts = 4;

Prefetcher::Prefetcher(const Variant& variant, LookAhead mode)
    : governor_(mode), prefill_governor_(mode), experts_per_token_(variant.experts().per_token) {
  for (int64_t layer = 0; layer < variant.num_layers(); ++layer) has_experts_.push_back(variant.is_moe(layer));
  reserve_lists(lists_, variant.experts().count);
  lists_.seen.resize(static_cast<size_t>(variant.experts().count));
}

int64_t Prefetcher::rows(int64_t layer, int64_t n) const {
  const auto next = static_cast<size_t>(layer) + 1;
  if (next >= has_experts_.size() || !has_experts_[next]) return 0;
  if (n == 1) return governor_.on() ? 1 : 0;
  return prefill_governor_.on() ? std::min(n, max_guess_rows) : 0;
}

void Prefetcher::propose(const RoutedExpertsBlock& next, int64_t rows) {
  forget();
  rows_ = rows;
  std::ranges::fill(lists_.seen, uint8_t{0});
  const int32_t* ids = next.router().guessed_ids().values<int32_t>();
  for (int64_t place = 0; place < next.per_token(); ++place)
    for (int64_t row = 0; row < rows; ++row) {
      const int32_t expert = ids[row * next.per_token() + place];
      if (!std::exchange(lists_.seen[static_cast<size_t>(expert)], uint8_t{1})) lists_.proposed.push_back(expert);
    }
}

void Prefetcher::begin(ExpertLoader& loader, int64_t layer, StepStats& stats, bool from_files) {
  // The next layer demands at least so many slots for one token; a guess takes none of them.
  const int64_t keep = experts_per_token_;
  const int64_t parts = rows_ == 1 ? single_parts : 1;
  const size_t before = lists_.guessed.size();
  for (; wants_more(); ++next_) {
    const int32_t expert = lists_.proposed[next_];
    if (from_files ? loader.has(layer + 1, expert) : loader.needs_no_guess(layer + 1, expert)) continue;
    if (!loader.guess(layer + 1, expert, keep, parts)) break;
    lists_.guessed.push_back(expert);
  }
  loader.begin_copies();
  if (rows_ == 1) next_ = lists_.proposed.size();
  stats.look_ahead_reads += static_cast<int64_t>(lists_.guessed.size() - before);
}

void Prefetcher::compare(ExpertLoader& loader, int64_t layer, std::span<const ExpertGroups::Group> picked,
                         StepStats& stats) {
  for (const int32_t expert : lists_.guessed) {
    const bool right = std::ranges::binary_search(picked, expert, {}, &ExpertGroups::Group::expert);
    // A right guess may have been given up meanwhile, because its slot was needed.
    if (right && loader.has(layer, expert))
      ++stats.look_ahead_used;
    else
      loader.dismiss(layer, expert);
  }
  forget();
}

void Prefetcher::forget() {
  lists_.proposed.clear();
  next_ = 0;
  lists_.guessed.clear();
}

void Prefetcher::add(int64_t n, const LookAheadGovernor::Step& step, StepStats& stats) {
  if (n == 1)
    governor_.add(step);
  else
    prefill_governor_.add({stats.expert_misses, stats.look_ahead_reads, stats.look_ahead_used});
  stats.look_ahead_pays = governor_.pays();
}

}  // namespace moeflux
