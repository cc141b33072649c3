#include "core/xxh64.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace moeflux {
namespace {

constexpr uint64_t prime_1 = 0x9e3779b185ebca87;
constexpr uint64_t prime_2 = 0xc2b2ae3d27d4eb4f;
constexpr uint64_t prime_3 = 0x165667b19e3779f9;
constexpr uint64_t prime_4 = 0x85ebca77c2b2ae63;
constexpr uint64_t prime_5 = 0x27d4eb2f165667c5;

template <typename Number>
uint64_t little_endian(const std::byte* bytes) {
  Number number;
  std::memcpy(&number, bytes, sizeof(number));
  static_assert(std::endian::native == std::endian::little);
  return number;
}

uint64_t with_word(uint64_t sum, uint64_t word) { return std::rotl(sum + word * prime_2, 31) * prime_1; }

uint64_t joined(const std::array<uint64_t, 4>& sums) {
  uint64_t sum = std::rotl(sums[0], 1) + std::rotl(sums[1], 7) + std::rotl(sums[2], 12) + std::rotl(sums[3], 18);
  for (const uint64_t each : sums) sum = (sum ^ with_word(0, each)) * prime_1 + prime_4;
  return sum;
}

// What is left behind the last whole block, in the largest pieces that fit.
uint64_t with_rest(uint64_t sum, const std::byte* rest, size_t bytes) {
  for (; bytes >= 8; rest += 8, bytes -= 8)
    sum = std::rotl(sum ^ with_word(0, little_endian<uint64_t>(rest)), 27) * prime_1 + prime_4;
  for (; bytes >= 4; rest += 4, bytes -= 4)
    sum = std::rotl(sum ^ little_endian<uint32_t>(rest) * prime_1, 23) * prime_2 + prime_3;
  for (; bytes > 0; ++rest, --bytes) sum = std::rotl(sum ^ little_endian<uint8_t>(rest) * prime_5, 11) * prime_1;
  return sum;
}

// Every bit has its say in every other.
uint64_t avalanche(uint64_t sum) {
  sum = (sum ^ sum >> 33) * prime_2;
  sum = (sum ^ sum >> 29) * prime_3;
  return sum ^ sum >> 32;
}

}  // namespace

Xxh64::Lanes Xxh64::beginning() { return {prime_1 + prime_2, prime_2, 0, 0 - prime_1}; }

// The lanes do not wait for each other, which is what makes it fast.
void Xxh64::add_blocks(const std::byte* data, size_t blocks) {
  Lanes sums = sums_;
  for (; blocks > 0; --blocks, data += block_bytes)
    for (size_t i = 0; i < lanes; ++i) sums[i] = with_word(sums[i], little_endian<uint64_t>(data + 8 * i));
  sums_ = sums;
}

void Xxh64::add(std::span<const std::byte> data) {
  const size_t filled = bytes_ % block_bytes;
  bytes_ += data.size();
  if (filled + data.size() < block_bytes) {
    std::ranges::copy(data, rest_.begin() + static_cast<std::ptrdiff_t>(filled));
    return;
  }
  if (filled > 0) {
    const auto missing = data.first(block_bytes - filled);
    std::ranges::copy(missing, rest_.begin() + static_cast<std::ptrdiff_t>(filled));
    add_blocks(rest_.data(), 1);
    data = data.subspan(missing.size());
  }
  const size_t blocks = data.size() / block_bytes;
  add_blocks(data.data(), blocks);
  std::ranges::copy(data.subspan(blocks * block_bytes), rest_.begin());
}

uint64_t Xxh64::sum() const {
  const uint64_t sum = (bytes_ < block_bytes ? prime_5 : joined(sums_)) + bytes_;
  return avalanche(with_rest(sum, rest_.data(), bytes_ % block_bytes));
}

}  // namespace moeflux
