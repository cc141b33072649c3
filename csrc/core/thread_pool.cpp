#include "core/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "core/forks.h"
#include "core/pause.h"

namespace moeflux {
namespace {

constexpr uint64_t one_inside = 1;
constexpr uint64_t those_inside = 0xffff;
constexpr uint64_t open = 0x10000;
constexpr uint64_t one_task = 0x20000;

constexpr uint64_t stretch_of(uint64_t first, uint64_t last) { return first << 32 | last; }
constexpr uint64_t first_of(uint64_t stretch) { return stretch >> 32; }
constexpr uint64_t last_of(uint64_t stretch) { return stretch & 0xffffffff; }

constexpr uint64_t task_of(uint64_t state) { return state / one_task; }

}  // namespace

ThreadPool::ThreadPool(int threads, std::chrono::microseconds lookout) : lookout_(lookout), forks_(forks()) {
  if (threads <= 0) threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  threads = std::min(threads, 1024);
  stretches_ = std::make_unique<Stretch[]>(static_cast<size_t>(threads));
  workers_.reserve(static_cast<size_t>(threads - 1));
  try {
    for (size_t i = 1; i < static_cast<size_t>(threads); ++i) workers_.start([this, i] { work(i); });
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  if (forks_ != forks()) {
    // The threads are in the parent, and what they sleep on cannot be destroyed without them.
    workers_.detach();
    (void)sleep_.release();
    return;
  }
  {
    const std::lock_guard lock(sleep_->mutex);
    ending_ = true;
  }
  sleep_->wake.notify_all();
  workers_.join();
}

void ThreadPool::run(int64_t units, Unit unit, void* body) {
  if (units <= 1 || workers_.size() == 0 || forks_ != forks()) {
    for (int64_t i = 0; i < units; ++i) unit(body, i);
    return;
  }
  begin(units, unit, body);
  finish();
}

void ThreadPool::begin(int64_t units, Unit unit, void* body) {
  callers_.lock();
  unit_ = unit;
  body_ = body;
  const auto all = static_cast<uint64_t>(units);
  const auto threads = static_cast<uint64_t>(workers_.size() + 1);
  for (uint64_t i = 0; i < threads; ++i)
    stretches_[i].units.store(stretch_of(all * i / threads, all * (i + 1) / threads), std::memory_order_relaxed);
  // This store and a sleeper's announcement have one order for all threads. A sleeper looks at the state once more
  // after announcing itself, so one of the two sides sees the other.
  state_.store((task_of(state_.load(std::memory_order_relaxed)) + 1) * one_task | open);
  if (sleeping_.load() > 0) {
    {
      const std::lock_guard lock(sleep_->mutex);
    }
    sleep_->wake.notify_all();
  }
}

void ThreadPool::finish() {
  const std::lock_guard turn(callers_, std::adopt_lock);
  do_units(0);
  state_.fetch_and(~open, std::memory_order_acq_rel);
  await_soon([&] { return (state_.load(std::memory_order_acquire) & those_inside) == 0; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::do_units(size_t thread) {
  std::atomic<uint64_t>& own = stretches_[thread].units;
  try {
    do {
      uint64_t units = own.load(std::memory_order_relaxed);
      while (first_of(units) < last_of(units)) {
        if (!own.compare_exchange_weak(units, units + stretch_of(1, 0), std::memory_order_relaxed)) continue;
        unit_(body_, static_cast<int64_t>(first_of(units)));
        units = own.load(std::memory_order_relaxed);
      }
    } while (take_over(thread));
  } catch (...) {
    for (size_t i = 0; i <= workers_.size(); ++i) stretches_[i].units.store(0, std::memory_order_relaxed);
    const std::lock_guard lock(sleep_->mutex);
    if (!error_) error_ = std::current_exception();
  }
}

bool ThreadPool::take_over(size_t thread) {
  const size_t threads = workers_.size() + 1;
  for (size_t i = 1; i < threads; ++i) {
    std::atomic<uint64_t>& other = stretches_[(thread + i) % threads].units;
    uint64_t units = other.load(std::memory_order_relaxed);
    while (first_of(units) < last_of(units)) {
      const uint64_t middle = first_of(units) + (last_of(units) - first_of(units)) / 2;
      if (!other.compare_exchange_weak(units, stretch_of(first_of(units), middle), std::memory_order_relaxed)) continue;
      stretches_[thread].units.store(stretch_of(middle, last_of(units)), std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

void ThreadPool::work(size_t thread) {
  uint64_t seen = 0;
  for (;;) {
    uint64_t state = await_task(seen);
    if (ending_.load(std::memory_order_relaxed)) return;
    seen = task_of(state);
    while (state & open && task_of(state) == seen) {
      if (!state_.compare_exchange_weak(state, state + one_inside, std::memory_order_acquire)) continue;
      do_units(thread);
      state_.fetch_sub(one_inside, std::memory_order_release);
      break;
    }
  }
}

uint64_t ThreadPool::await_task(uint64_t seen) {
  const auto news = [&](uint64_t state) { return task_of(state) != seen || ending_.load(std::memory_order_relaxed); };
  const auto until = std::chrono::steady_clock::now() + lookout_;
  uint64_t state = 0;
  do {
    for (int i = 0; i < 64; ++i) {
      state = state_.load(std::memory_order_relaxed);
      if (news(state)) return state;
      pause();
    }
  } while (std::chrono::steady_clock::now() < until);
  std::unique_lock lock(sleep_->mutex);
  ++sleeping_;
  sleep_->wake.wait(lock, [&] { return news(state = state_.load()); });
  --sleeping_;
  return state;
}

}  // namespace moeflux
