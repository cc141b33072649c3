// The memory that the sessions of an engine may take together, and what they have taken.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "moeflux.h"

namespace moeflux {

// Used from several threads at once, and in a forked child, where a lock could be held by a thread that is not there.
class SessionMemory {
 public:
  explicit SessionMemory(int64_t limit) : limit_(limit) {}  // bytes; 0: no limit

  // One session's part, given back when it goes.
  class Share {
   public:
    // BudgetError that says what `asker` asked for, when not so much is left.
    Share(SessionMemory& memory, const Footprint& bytes, const std::string& asker);
    ~Share();
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;

    // Another size for the checkpoints. BudgetError as above; nothing has changed then.
    void resize_checkpoints(int64_t bytes, const std::string& asker = {});

   private:
    SessionMemory& memory_;
    Footprint bytes_;
  };

  Footprint held() const;
  int64_t sessions() const { return sessions_; }

 private:
  void take(int64_t bytes, const std::string& asker);

  int64_t limit_;
  std::atomic<int64_t> taken_{0};
  std::atomic<int64_t> sessions_{0};
  // The parts of taken_, by purpose.
  std::atomic<int64_t> rows_{0};
  std::atomic<int64_t> recurrent_{0};
  std::atomic<int64_t> checkpoints_{0};
  std::atomic<int64_t> tokens_{0};
};

}  // namespace moeflux
