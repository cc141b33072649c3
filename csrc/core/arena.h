// Zeroed memory from the system, page-aligned; large ones are aligned to and asked as huge pages, which weights read at
// memory speed need. Given back when the Arena goes. What is resident of one is never more than `arena_bytes` of its
// size: huge pages lie within it, and are refused where it is small.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace moeflux {

// What an Arena of `bytes` takes from the system once all of it has been touched: whole pages.
int64_t arena_bytes(int64_t bytes);

class Arena {
 public:
  // IoError naming `what` when the system refuses.
  Arena(int64_t bytes, const std::string& what);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  void* mapping_ = nullptr;
  size_t mapped_ = 0;
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace moeflux
