#include "decoder/ahead.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <utility>

#include "core/error.h"
#include "core/forks.h"

namespace moeflux {
namespace {

bool is_only_a_token(const DecoderEvent& event) {
  return event.token && event.finish.empty() && event.error.empty() && event.evaluated == 0;
}

}  // namespace

Decoder::Ahead::~Ahead() {
  if (thread_.size() > 0 && forks_ != forks()) {
    // The thread is in the parent, and what it sleeps on cannot be destroyed without it.
    thread_.detach();
    (void)sleep_.release();
    return;
  }
  given_up_ = true;
  {
    const std::lock_guard lock(sleep_->mutex);
    over_ = true;
  }
  sleep_->changed.notify_all();
}

void Decoder::Ahead::begin() {
  {
    const std::lock_guard lock(sleep_->mutex);
    if (has_any()) return;
    if (thread_.size() == 0) {
      forks_ = forks();
      thread_.start([this] { work(); });
    }
    active_ = true;
    ended_ = false;
    given_up_ = false;
  }
  sleep_->changed.notify_all();
}

void Decoder::Ahead::end(bool at_once) {
  {
    const std::lock_guard lock(sleep_->mutex);
    if (!active_) return;
    ended_ = true;
    if (at_once) given_up_ = true;
  }
  sleep_->changed.notify_all();
}

bool Decoder::Ahead::is_under_way() const {
  const std::lock_guard lock(sleep_->mutex);
  return has_any();
}

std::optional<std::vector<DecoderEvent>> Decoder::Ahead::take() {
  std::unique_lock lock(sleep_->mutex);
  if (!has_any() || forks_ != forks()) return std::nullopt;
  sleep_->changed.wait(lock, [this] { return untaken_ > 0 || !active_; });
  std::vector<DecoderEvent> taken;
  const std::span<std::vector<DecoderEvent>> made = std::span(events_).first(untaken_);
  size_t count = 0;
  for (const auto& each : made) count += each.size();
  taken.reserve(count);
  for (auto& each : made) std::ranges::move(std::exchange(each, {}), std::back_inserter(taken));
  if (untaken_ == 0 && error_) std::rethrow_exception(std::exchange(error_, nullptr));
  untaken_ = 0;
  sleep_->changed.notify_all();
  return taken;
}

void Decoder::Ahead::work() {
  std::unique_lock lock(sleep_->mutex);
  for (;;) {
    sleep_->changed.wait(lock, [this] { return over_ || (active_ && (ended_ || untaken_ < most_untaken)); });
    if (over_) return;
    if (ended_) {
      active_ = false;
      sleep_->changed.notify_all();
      continue;
    }
    lock.unlock();
    std::vector<DecoderEvent> events;
    std::exception_ptr error;
    bool goes_on = false;
    try {
      events = decoder_.step_now([this] {
        if (given_up_) throw Cancelled("a step ahead: given up");
      });
      goes_on = !events.empty() && std::ranges::all_of(events, is_only_a_token) && decoder_.can_go_ahead();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    events_[untaken_++] = std::move(events);
    error_ = std::move(error);
    active_ = goes_on;
    sleep_->changed.notify_all();
  }
}

}  // namespace moeflux
