// SHA-256, with the machine's own instructions where it has them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace moeflux {

using Sha256Sum = std::array<uint8_t, 32>;

class Sha256 {
 public:
  void add(std::span<const std::byte> data);
  Sha256Sum sum();  // of everything added; the object is used up

 private:
  std::span<const std::byte> add_to_rest(std::span<const std::byte> data);
  void keep(std::span<const std::byte> data);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> rest_{};  // of a block not yet full
  uint64_t bytes_ = 0;
};

std::string hex(const Sha256Sum& sum);
// The sum that 64 hexadecimal digits stand for. If the text is anything else, a FormatError that begins with `where`.
Sha256Sum parse_sha256(std::string_view text, const std::string& where);

}  // namespace moeflux
