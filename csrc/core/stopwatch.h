#pragma once

#include <chrono>
#include <utility>

namespace moeflux {

class Stopwatch {
 public:
  // The time since it was made, or since the last lap.
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  double lap() {
    const Clock::time_point before = std::exchange(start_, Clock::now());
    return std::chrono::duration<double>(start_ - before).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

}  // namespace moeflux
