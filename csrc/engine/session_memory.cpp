#include "engine/session_memory.h"

#include <algorithm>
#include <limits>

#include "core/error.h"
#include "core/text.h"

namespace moeflux {

SessionMemory::Share::Share(SessionMemory& memory, const Footprint& bytes, int64_t host_bytes, const std::string& asker)
    : memory_(memory), bytes_(bytes), host_bytes_(memory.host_limit_ ? host_bytes : 0) {
  memory_.check(bytes_.sessions() - host_bytes_, memory_.taken_ - memory_.rows_, asker);
  bytes_.rows = 0;
  memory_.take_of_host(host_bytes_, asker);
  try {
    memory_.take(bytes_.sessions() - host_bytes_, asker);
  } catch (...) {
    memory_.host_taken_ -= host_bytes_;
    throw;
  }
  ++memory_.sessions_;
  memory_.recurrent_ += bytes_.recurrent;
  memory_.checkpoints_ += bytes_.checkpoints;
  memory_.tokens_ += bytes_.tokens;
}

SessionMemory::Share::~Share() {
  memory_.taken_ -= bytes_.sessions() - host_bytes_;
  memory_.host_taken_ -= host_bytes_;
  --memory_.sessions_;
  memory_.recurrent_ -= bytes_.recurrent;
  memory_.checkpoints_ -= bytes_.checkpoints;
  memory_.tokens_ -= bytes_.tokens;
}

void SessionMemory::Share::resize_checkpoints(int64_t bytes, const std::string& asker) {
  const int64_t more = bytes - bytes_.checkpoints;
  memory_.take(more, asker);
  memory_.checkpoints_ += more;
  bytes_.checkpoints = bytes;
}

void SessionMemory::take(int64_t bytes, const std::string& asker) {
  int64_t taken = taken_;
  do {
    check(bytes, taken, asker);
  } while (!taken_.compare_exchange_weak(taken, taken + bytes));
}

void SessionMemory::take_of_host(int64_t bytes, const std::string& asker) {
  const int64_t before = host_taken_.fetch_add(bytes);
  if (!host_limit_ || bytes <= host_limit_ - before) return;
  host_taken_ -= bytes;
  throw BudgetError(
      concat(asker, ": expected at most ", sized(host_limit_ - before), " of the host's memory, which is left of ",
             sized(host_limit_), " for sessions, found ", sized(bytes),
             ": close a session, ask for less, or load the model with more `memory` or more `sessions`"),
      bytes - (host_limit_ - before));
}

void SessionMemory::check(int64_t bytes, int64_t taken, const std::string& asker) const {
  if (!limit_ || bytes <= limit_ - taken) return;
  const char* where = host_limit_ ? " of the device's memory" : "";
  const char* more = host_limit_ ? "`device_memory`" : "`memory`";
  throw BudgetError(
      concat(asker, ": expected at most ", sized(limit_ - taken), where, ", which is left of ", sized(limit_),
             " for sessions, found ", sized(bytes), ": close a session, ask for less, or load the model with more ",
             more, ", a longer `context` or more `sessions`"),
      bytes - (limit_ - taken));
}

void SessionMemory::check(int64_t bytes, const std::string& asker) const { check(bytes, taken_, asker); }

int64_t SessionMemory::rows_left(int64_t rows, int64_t all, int64_t held) const {
  if (!limit_) return std::numeric_limits<int64_t>::max();
  const int64_t others = (taken_ - rows_) / std::max<int64_t>(1, sessions_);  // of one session
  const int64_t sessions = limit_ / std::max<int64_t>(1, all + others);
  return std::min({sessions * rows - held, sessions * all - rows_, limit_ - taken_});
}

void SessionMemory::take_rows(int64_t bytes, const std::string& asker) {
  take(bytes, asker);
  rows_ += bytes;
}

void SessionMemory::give_back_rows(int64_t bytes) noexcept {
  rows_ -= bytes;
  taken_ -= bytes;
}

Footprint SessionMemory::held() const {
  Footprint bytes;
  bytes.rows = rows_;
  bytes.recurrent = recurrent_;
  bytes.checkpoints = checkpoints_;
  bytes.tokens = tokens_;
  return bytes;
}

}  // namespace moeflux
