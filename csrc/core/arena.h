// Zeroed, page-aligned memory from the system, given back when the Arena goes. A large arena is aligned to huge pages
// and asks for them, because reading weights at memory speed needs them. Never more than `arena_bytes` of its size are
// resident: huge pages lie within the arena, and a small one refuses them.
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
