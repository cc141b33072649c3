#include "engine/draft_governor.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <utility>

namespace moeflux {
namespace {

constexpr int64_t window = 16;  // calls
constexpr int64_t kept_for = 512;
constexpr int64_t shortest_rest = 64;
constexpr int64_t longest_rest = 4096;
constexpr double beside_loss = 32;    // a rest is so many times as long as what a window has lost
constexpr double gain = 1.02;         // of the rate without drafts, or with as many as now; less may be noise
constexpr double moved = 1.25;        // so much more or less is another machine
constexpr double remembered = 8;      // so many outcomes of before a rest count beside new ones
constexpr double usual_chance = 0.5;  // until one is known
constexpr double undisturbed = 0.5;   // of calls

}  // namespace

// ---- What is measured -----------------------------------------------------------------------------------------------

void DraftGovernor::Times::add(double seconds) { last_[static_cast<size_t>(count_++ % room)] = seconds; }

std::optional<double> DraftGovernor::Times::typical() const {
  if (count_ < few) return {};
  std::array<double, room> sorted = last_;
  const auto end = sorted.begin() + std::min(count_, room);
  std::sort(sorted.begin(), end);
  const auto number = static_cast<int64_t>(undisturbed * static_cast<double>(end - sorted.begin()));
  return std::accumulate(sorted.begin(), sorted.begin() + number, 0.0) / static_cast<double>(number);
}

void DraftGovernor::Share::add(bool happened) {
  happened_ = kept_ * happened_ + happened;
  all_ = kept_ * all_ + 1;
}

void DraftGovernor::Share::limit(double number) {
  if (all_ <= number) return;
  happened_ *= number / all_;
  all_ = number;
}

DraftChances DraftGovernor::Drafting::chances() const {
  DraftChances found;
  double before = usual_chance;
  for (size_t i = 0; i < found.size(); ++i) before = found[i] = came[i].value(before);
  return found;
}

// ---- What follows from it -------------------------------------------------------------------------------------------

int64_t DraftGovernor::drafts(int64_t longest) const {
  if (mode_ != Speculate::automatic) return mode_ == Speculate::off ? 0 : longest;
  const std::lock_guard lock(mutex_);
  return is_on() ? drafting_[kind(longest)].drafts : 0;
}

std::optional<bool> DraftGovernor::pays() const {
  if (mode_ != Speculate::automatic) return {};
  const std::lock_guard lock(mutex_);
  return pays_;
}

void DraftGovernor::add_outcome(int64_t longest, int64_t drafted, int64_t came) {
  if (mode_ != Speculate::automatic) return;
  const std::lock_guard lock(mutex_);
  follows_right_.add(kind(longest) == 1);
  said_ += came;
  for (int64_t i = 0; i < std::min(drafted, came + 1); ++i)
    drafting_[kind(longest)].came[static_cast<size_t>(i)].add(i < came);
}

void DraftGovernor::add(const Call& call) {
  if (mode_ != Speculate::automatic) return;
  const std::lock_guard lock(mutex_);
  // The drafts of a window's last call have come true, or not, before the next call.
  if (is_on() && counted_ == window) decide();
  if (std::abs(call.tokens - company_) > company_ / 4) {
    if (state_ != State::resting) enter(State::watching);
    times_ = {};
    company_ = call.tokens;
  }
  ++calls_;
  if (state_ == State::resting && calls_ >= rest_) return enter(State::watching);
  if (state_ == State::kept && calls_ >= kept_for) return enter(State::watching);
  if (!is_on() && call.drafted > 0) return;  // drafted before the change
  const double each = std::ceil(static_cast<double>(call.drafted) / static_cast<double>(call.tokens));
  const size_t number = std::min<size_t>(static_cast<size_t>(each), max_drafts);
  ++made_[number];
  said_ += call.tokens;
  if (!std::exchange(settled_, true)) return;
  times_[number].add(call.seconds);
  counted_ += is_on() == (call.drafted > 0);
  if (state_ == State::watching && counted_ == window) return enter(State::trying);
  if (state_ == State::trying && times_.back().typical()) choose(seconds());
}

DraftSeconds DraftGovernor::seconds() const {
  DraftSeconds found;
  std::transform(times_.begin(), times_.end(), found.begin(), [](const Times& times) { return times.typical(); });
  return found;
}

void DraftGovernor::choose(const DraftSeconds& seconds) {
  for (Drafting& drafting : drafting_) {
    const DraftChances chances = drafting.chances();
    const auto rate = [&](int64_t k) { return expected_tokens(chances, k) / estimated_seconds(seconds, k); };
    // One at least, where drafts are on: nobody else would say that the text begins to repeat itself.
    const int64_t best = best_drafts(seconds, chances, 1);
    if (rate(best) > gain * rate(drafting.drafts)) drafting.drafts = best;
  }
}

// By how many calls without drafts the window took longer than its tokens would have without them. It goes by what
// calls take, because other programs are not its fault.
int64_t DraftGovernor::calls_lost(const DraftSeconds& seconds) const {
  double taken = 0;
  for (size_t i = 0; i < made_.size(); ++i)
    taken += static_cast<double>(made_[i]) * estimated_seconds(seconds, static_cast<int64_t>(i));
  return std::llround(taken / *seconds[0] - static_cast<double>(said_) / static_cast<double>(company_));
}

// Whether calls with drafts no longer take what they took beside those without: experts were read from a disk then, or
// the text has become long.
bool DraftGovernor::has_moved(const DraftSeconds& seconds) const {
  for (size_t i = 0; i < seconds.size(); ++i)
    if (known_[i] && (*seconds[i] > moved * *known_[i] || *known_[i] > moved * *seconds[i])) return true;
  return false;
}

void DraftGovernor::decide() {
  const DraftSeconds seconds = this->seconds();
  const int64_t lost = calls_lost(seconds);
  counted_ = 0;
  made_ = {};
  said_ = 0;
  if (state_ == State::kept && has_moved(seconds)) return enter(State::watching);
  choose(seconds);
  const double right = follows_right_.value(usual_chance);
  double tokens = 0;
  double taken = 0;
  for (size_t i = 0; i < drafting_.size(); ++i) {
    const double share = i == 1 ? right : 1 - right;
    tokens += share * expected_tokens(drafting_[i].chances(), drafting_[i].drafts);
    taken += share * estimated_seconds(seconds, drafting_[i].drafts);
  }
  pays_ = tokens / taken > (state_ == State::trying ? gain : 1) / *seconds[0];
  if (!*pays_) {
    const auto least = static_cast<int64_t>(beside_loss * static_cast<double>(lost));
    rest_ = std::clamp(std::max(2 * rest_, least), shortest_rest, longest_rest);
    return enter(State::resting);
  }
  rest_ = 0;
  if (state_ != State::trying) return;
  known_ = seconds;
  enter(State::kept);
}

void DraftGovernor::enter(State state) {
  state_ = state;
  settled_ = false;
  calls_ = counted_ = said_ = 0;
  made_ = {};
  if (state == State::watching) times_ = {};
  if (state != State::trying) return;
  for (Drafting& drafting : drafting_) {
    drafting.drafts = max_drafts;
    for (Share& share : drafting.came) share.limit(remembered);
  }
}

}  // namespace moeflux
