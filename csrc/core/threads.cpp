#include "core/threads.h"

#include <system_error>
#include <utility>

#include "core/error.h"

namespace moeflux {

void Threads::start(std::function<void()> body) {
  const auto run = [this, body = std::move(body)] {
    try {
      body();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  };
  try {
    threads_.emplace_back(run);
  } catch (const std::system_error& error) {
    throw IoError(concat("threads ", purpose_, ": expected one more from the system than ", size(),
                         ", found none: ", error.what()));
  }
}

void Threads::wait() {
  for (std::thread& thread : threads_)
    if (thread.joinable()) thread.join();
}

void Threads::join() {
  wait();
  threads_.clear();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Threads::detach() {
  for (std::thread& thread : threads_) thread.detach();
}

}  // namespace moeflux
