// Random numbers: Philox 4x64 with ten rounds, as NumPy's generator of that name gives them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace moeflux {

class Philox {
 public:
  explicit Philox(uint64_t key) : key_(key) {}

  uint64_t next() {
    if (used_ == block_.size()) {
      ++counter_;
      block_ = block(counter_, key_);
      used_ = 0;
    }
    return block_[used_++];
  }

  // In [0, 1): the upper 53 bits of the next number.
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  using Block = std::array<uint64_t, 4>;
  __extension__ typedef unsigned __int128 Product;

  // The counter and the key have 256 and 128 bits; what is above the lowest 64 stays 0.
  static Block block(uint64_t counter, uint64_t key) {
    Block x = {counter, 0, 0, 0};
    uint64_t other_key = 0;
    for (int round = 0; round < 10; ++round) {
      const Product a = Product{0xd2e7470ee14c6c93} * x[0];
      const Product b = Product{0xca5a826395121157} * x[2];
      x = {static_cast<uint64_t>(b >> 64) ^ x[1] ^ key, static_cast<uint64_t>(b),
           static_cast<uint64_t>(a >> 64) ^ x[3] ^ other_key, static_cast<uint64_t>(a)};
      key += 0x9e3779b97f4a7c15;
      other_key += 0xbb67ae8584caa73b;
    }
    return x;
  }

  uint64_t key_;
  uint64_t counter_ = 0;
  Block block_ = {};
  size_t used_ = block_.size();
};

}  // namespace moeflux
