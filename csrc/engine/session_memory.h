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
  // Bytes; 0: no limit. `host_limit` is as EngineOptions::host_session_bytes.
  SessionMemory(int64_t limit, int64_t host_limit) : limit_(limit), host_limit_(host_limit) {}

  // One session's part, given back when it goes.
  class Share {
   public:
    // But for its rows, which are taken as they are used: it is enough that there would be room for them if the other
    // sessions had none. `host_bytes` of them are in the host's memory, and the device has another. BudgetError that
    // says what `asker` asked for, when there is not so much.
    Share(SessionMemory& memory, const Footprint& bytes, int64_t host_bytes, const std::string& asker);
    ~Share();
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;

    // Another size for the checkpoints. BudgetError as above; nothing has changed then.
    void resize_checkpoints(int64_t bytes, const std::string& asker = {});

   private:
    SessionMemory& memory_;
    Footprint bytes_;
    int64_t host_bytes_;
  };

  // BudgetError as above when not so much is left now.
  void check(int64_t bytes, const std::string& asker) const;
  // What rows of one kind may take besides the `held` that they have, if sessions that need `rows` for them, and `all`
  // for those of all kinds, have all of the limit: there is room for the rest of what each needs then. Never more than
  // what is left now.
  int64_t rows_left(int64_t rows, int64_t all, int64_t held) const;
  void take_rows(int64_t bytes, const std::string& asker);
  void give_back_rows(int64_t bytes) noexcept;

  Footprint held() const;
  int64_t sessions() const { return sessions_; }

 private:
  void take(int64_t bytes, const std::string& asker);
  void check(int64_t bytes, int64_t taken, const std::string& asker) const;
  void take_of_host(int64_t bytes, const std::string& asker);

  int64_t limit_;
  int64_t host_limit_;
  std::atomic<int64_t> taken_{0};
  std::atomic<int64_t> host_taken_{0};
  std::atomic<int64_t> sessions_{0};
  // The parts of taken_, by purpose.
  std::atomic<int64_t> rows_{0};
  std::atomic<int64_t> recurrent_{0};
  std::atomic<int64_t> checkpoints_{0};
  std::atomic<int64_t> tokens_{0};
};

}  // namespace moeflux
