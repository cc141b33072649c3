// XXH64, a sum against damage: an order of magnitude faster than SHA-256, and no help against people.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace moeflux {

class Xxh64 {
 public:
  void add(std::span<const std::byte> data);
  uint64_t sum() const;  // of everything added so far

 private:
  static constexpr size_t lanes = 4;
  static constexpr size_t block_bytes = lanes * sizeof(uint64_t);
  using Lanes = std::array<uint64_t, lanes>;

  static Lanes beginning();
  void add_blocks(const std::byte* data, size_t blocks);

  Lanes sums_ = beginning();
  std::array<std::byte, block_bytes> rest_{};  // of a block not yet full
  uint64_t bytes_ = 0;
};

}  // namespace moeflux
