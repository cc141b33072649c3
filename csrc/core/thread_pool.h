// Threads that divide one task at a time into units. They are kept between tasks. They look out for the next task for
// some tens of microseconds, or for as long as they are told, and then sleep. The caller is one of them.
//
// Each thread begins with a stretch of units of its own and goes through it in order. So its next unit is known, and
// can be asked for from memory. A thread that has no units left takes over the second half of another's.
//
// Callers on several host threads take turns. A thread of the pool that comes too late for a task has no part in it. So
// a sleeping or absent thread (a child made by fork has none) delays nobody.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <type_traits>

#include "core/threads.h"

namespace moeflux {

class ThreadPool {
 public:
  // How long threads look out: longer than it takes from one op of a step to the next.
  static constexpr std::chrono::microseconds usual_lookout{50};

  // `threads` in all, the caller included; 0: one per core. IoError when the system refuses so many.
  explicit ThreadPool(int threads, std::chrono::microseconds lookout = usual_lookout);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(unit) once for each unit 0 ... units - 1, fewer than 2^32, and returns when all have returned. After
  // `unit`, a thread mostly does `unit` + 1. An exception stops the handing out of units, and the first one is
  // rethrown. A body must not call `parallel` of its own pool.
  template <typename Body>
  void parallel(int64_t units, Body&& body) {
    run(units, call<std::remove_reference_t<Body>>, const_cast<void*>(static_cast<const void*>(std::addressof(body))));
  }
  // The same in two steps, of one thread: between them it does something else while the others work, and `body` stays.
  // Not in a child made by fork.
  template <typename Body>
  void begin(int64_t units, Body& body) {
    begin(units, call<Body>, const_cast<void*>(static_cast<const void*>(std::addressof(body))));
  }
  void finish();

 private:
  using Unit = void (*)(void* body, int64_t unit);
  template <typename Body>
  static void call(void* body, int64_t unit) {
    (*static_cast<Body*>(body))(unit);
  }

  // Units first ... last - 1 in one word, because others may take from the end while the owner takes from the
  // beginning.
  struct alignas(64) Stretch {
    std::atomic<uint64_t> units{0};  // first * 2^32 + last
  };

  void run(int64_t units, Unit unit, void* body);
  void begin(int64_t units, Unit unit, void* body);
  void stop();
  void work(size_t thread);            // what a thread of the pool does until the end
  void do_units(size_t thread);        // does units of the open task until none is left
  bool take_over(size_t thread);       // makes units of another thread the stretch of this one
  uint64_t await_task(uint64_t seen);  // the state that has a task newer than `seen`, or is the last

  std::mutex callers_;

  // The task. Written by the caller while it is closed and nobody is inside.
  Unit unit_ = nullptr;
  void* body_ = nullptr;
  std::exception_ptr error_;              // guarded by sleep_->mutex
  std::unique_ptr<Stretch[]> stretches_;  // of each thread; the caller's is the first

  // A count of tasks, whether the last one is open, and how many threads of the pool are inside it: one word, so that
  // nobody enters a task that its caller has closed.
  alignas(64) std::atomic<uint64_t> state_{0};

  struct Sleep {
    std::mutex mutex;
    std::condition_variable wake;
  };
  std::unique_ptr<Sleep> sleep_ = std::make_unique<Sleep>();
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<bool> ending_{false};
  std::chrono::microseconds lookout_;
  int64_t forks_ = 0;  // when the threads were made
  Threads workers_{"that compute"};
};

}  // namespace moeflux
