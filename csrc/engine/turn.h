// Whose turn it is: a lock that can be asked for during some time. Whoever came first has it first, or somebody who
// takes it again at once, as a decoder does that makes step after step, would keep it from all others.
//
// std::timed_mutex would do, but its waiting with a time limit is unknown to ThreadSanitizer, which then reports
// everything that it protects. std::condition_variable would do, but where the C library is to be an old one, and on
// Macs, it waits by the system's clock: somebody sets that back by an hour, and who waits 50 ms does so for an hour.
#pragma once

#include <pthread.h>

#include <chrono>
#include <cstdint>
#include <ctime>
#include <mutex>

namespace moeflux {

class Turn {
 public:
  Turn() {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
#ifndef __APPLE__
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
#endif
    pthread_cond_init(&free_, &attributes);
    pthread_condattr_destroy(&attributes);
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn() { pthread_cond_destroy(&free_); }

  void lock() {
    const std::lock_guard lock(mutex_);
    Waiting me(*this);
    while (!me.is_next()) pthread_cond_wait(&free_, mutex_.native_handle());
    taken_ = true;
  }
  bool try_lock() { return try_lock_for(std::chrono::milliseconds(0)); }
  bool try_lock_for(std::chrono::milliseconds patience) {
    const auto until = std::chrono::steady_clock::now() + patience;
    const std::lock_guard lock(mutex_);
    Waiting me(*this);
    while (!me.is_next()) {
      const std::chrono::nanoseconds left = until - std::chrono::steady_clock::now();
      if (left.count() <= 0) return false;
      wait(left.count());
    }
    return taken_ = true;
  }
  void unlock() {
    const std::lock_guard lock(mutex_);
    taken_ = false;
    if (first_) pthread_cond_broadcast(&free_);
  }

 private:
  // Somebody who waits, in a list by when he came.
  class Waiting {
   public:
    explicit Waiting(Turn& turn) : turn_(turn), place_(&turn.first_) {
      while (*place_) place_ = &(*place_)->after_;
      *place_ = this;
    }
    ~Waiting() {
      place_ = &turn_.first_;
      while (*place_ != this) place_ = &(*place_)->after_;
      *place_ = after_;
      if (after_ && !turn_.taken_) pthread_cond_broadcast(&turn_.free_);  // it was next, and gives up
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    bool is_next() const { return !turn_.taken_ && turn_.first_ == this; }

   private:
    Turn& turn_;
    Waiting* after_ = nullptr;
    Waiting** place_;
  };

  // So many nanoseconds, or less.
  void wait(int64_t left) {
    constexpr int64_t second = 1'000'000'000;
#ifdef __APPLE__
    const timespec span = {static_cast<time_t>(left / second), static_cast<long>(left % second)};
    pthread_cond_timedwait_relative_np(&free_, mutex_.native_handle(), &span);
#else
    timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    left += end.tv_nsec;
    end.tv_sec += static_cast<time_t>(left / second);
    end.tv_nsec = static_cast<long>(left % second);
    pthread_cond_timedwait(&free_, mutex_.native_handle(), &end);
#endif
  }

  std::mutex mutex_;
  pthread_cond_t free_;
  bool taken_ = false;
  Waiting* first_ = nullptr;
};

}  // namespace moeflux
