#include "core/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/cpu_features.h"
#include "core/error.h"
#include "core/text.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_SHA2)
#include <arm_neon.h>
#endif

namespace moeflux {
namespace {

constexpr size_t block_bytes = 64;

alignas(16) constexpr std::array<uint32_t, 64> round_constants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

void put_big_endian(uint32_t word, uint8_t* bytes) {
  for (int i = 0; i < 4; ++i) bytes[i] = static_cast<uint8_t>(word >> (24 - 8 * i));
}

#if !defined(__ARM_FEATURE_SHA2)
uint32_t big_endian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | uint32_t{bytes[3]};
}

void compress_portable(uint32_t* state, const uint8_t* data, size_t blocks) {
  for (; blocks > 0; --blocks, data += block_bytes) {
    std::array<uint32_t, 64> w;
    for (size_t t = 0; t < 16; ++t) w[t] = big_endian(data + 4 * t);
    for (size_t t = 16; t < 64; ++t) {
      const uint32_t low = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
      const uint32_t high = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
      w[t] = w[t - 16] + low + w[t - 7] + high;
    }
    std::array<uint32_t, 8> s;
    std::copy_n(state, 8, s.begin());
    for (size_t t = 0; t < 64; ++t) {
      const uint32_t mix_e = std::rotr(s[4], 6) ^ std::rotr(s[4], 11) ^ std::rotr(s[4], 25);
      const uint32_t mix_a = std::rotr(s[0], 2) ^ std::rotr(s[0], 13) ^ std::rotr(s[0], 22);
      const uint32_t first = s[7] + mix_e + ((s[4] & s[5]) ^ (~s[4] & s[6])) + round_constants[t] + w[t];
      const uint32_t second = mix_a + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      s = {first + second, s[0], s[1], s[2], s[3] + first, s[4], s[5], s[6]};
    }
    for (size_t i = 0; i < 8; ++i) state[i] += s[i];
  }
}
#endif

// With the instructions of both kinds of machine, four rounds go together and take four words of the schedule. The last
// sixteen words are kept.
#if defined(__x86_64__)
__attribute__((target("sha,sse4.1"))) void compress_x86(uint32_t* state, const uint8_t* data, size_t blocks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  // The instructions take the state as [a b e f] and [c d g h].
  const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state)), 0xb1);
  const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4)), 0x1b);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
  __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
  for (; blocks > 0; --blocks, data += block_bytes) {
    const __m128i abef_before = abef;
    const __m128i cdgh_before = cdgh;
    __m128i w[4];
    for (size_t i = 0; i < 4; ++i)
      w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 16 * i)), swap);
#pragma GCC unroll 16
    for (size_t i = 0; i < 16; ++i) {
      const auto* constants = reinterpret_cast<const __m128i*>(round_constants.data() + 4 * i);
      const __m128i words = _mm_add_epi32(w[i % 4], _mm_load_si128(constants));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, words);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(words, 0x0e));
      if (i >= 12) continue;
      const __m128i shifted = _mm_alignr_epi8(w[(i + 3) % 4], w[(i + 2) % 4], 4);
      const __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]), shifted);
      w[i % 4] = _mm_sha256msg2_epu32(sum, w[(i + 3) % 4]);
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

void compress(uint32_t* state, const uint8_t* data, size_t blocks) {
  if (cpu_features().sha && cpu_features().sse41) return compress_x86(state, data, blocks);
  compress_portable(state, data, blocks);
}
#elif defined(__ARM_FEATURE_SHA2)
void compress(uint32_t* state, const uint8_t* data, size_t blocks) {
  uint32x4_t abcd = vld1q_u32(state);
  uint32x4_t efgh = vld1q_u32(state + 4);
  for (; blocks > 0; --blocks, data += block_bytes) {
    const uint32x4_t abcd_before = abcd;
    const uint32x4_t efgh_before = efgh;
    uint32x4_t w[4];
    for (size_t i = 0; i < 4; ++i) w[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 16 * i)));
#pragma GCC unroll 16
    for (size_t i = 0; i < 16; ++i) {
      const uint32x4_t words = vaddq_u32(w[i % 4], vld1q_u32(round_constants.data() + 4 * i));
      const uint32x4_t before = abcd;
      abcd = vsha256hq_u32(abcd, efgh, words);
      efgh = vsha256h2q_u32(efgh, before, words);
      if (i >= 12) continue;
      const uint32x4_t sum = vsha256su0q_u32(w[i % 4], w[(i + 1) % 4]);
      w[i % 4] = vsha256su1q_u32(sum, w[(i + 2) % 4], w[(i + 3) % 4]);
    }
    abcd = vaddq_u32(abcd, abcd_before);
    efgh = vaddq_u32(efgh, efgh_before);
  }
  vst1q_u32(state, abcd);
  vst1q_u32(state + 4, efgh);
}
#else
void compress(uint32_t* state, const uint8_t* data, size_t blocks) { compress_portable(state, data, blocks); }
#endif

const uint8_t* begin_of(std::span<const std::byte> data) { return reinterpret_cast<const uint8_t*>(data.data()); }

}  // namespace

void Sha256::add(std::span<const std::byte> data) {
  data = add_to_rest(data);
  const size_t blocks = data.size() / block_bytes;
  compress(state_.data(), begin_of(data), blocks);
  bytes_ += blocks * block_bytes;
  keep(data.subspan(blocks * block_bytes));
}

// Fills the block that is begun. Returns what lies behind it.
std::span<const std::byte> Sha256::add_to_rest(std::span<const std::byte> data) {
  const size_t filled = bytes_ % block_bytes;
  if (filled == 0) return data;
  const size_t part = std::min(data.size(), block_bytes - filled);
  keep(data.first(part));
  if (filled + part == block_bytes) compress(state_.data(), rest_.data(), 1);
  return data.subspan(part);
}

// Data of at most what the block that is begun has room for.
void Sha256::keep(std::span<const std::byte> data) {
  std::copy_n(begin_of(data), data.size(), rest_.begin() + static_cast<std::ptrdiff_t>(bytes_ % block_bytes));
  bytes_ += data.size();
}

Sha256Sum Sha256::sum() {
  // The end is padded: a one bit, zeros up to the last eight bytes of a block, and the length in bits.
  const uint64_t bits = bytes_ * 8;
  std::array<uint8_t, 2 * block_bytes> end{};
  const size_t filled = bytes_ % block_bytes;
  const size_t size = filled + 9 <= block_bytes ? block_bytes : 2 * block_bytes;
  std::copy_n(rest_.begin(), filled, end.begin());
  end[filled] = 0x80;
  put_big_endian(static_cast<uint32_t>(bits >> 32), end.data() + size - 8);
  put_big_endian(static_cast<uint32_t>(bits), end.data() + size - 4);
  compress(state_.data(), end.data(), size / block_bytes);
  Sha256Sum sum;
  for (size_t i = 0; i < state_.size(); ++i) put_big_endian(state_[i], sum.data() + 4 * i);
  return sum;
}

std::string hex(const Sha256Sum& sum) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : sum) (text += digits[byte >> 4]) += digits[byte & 15];
  return text;
}

Sha256Sum parse_sha256(std::string_view text, const std::string& where) {
  const auto value = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  if (text.size() != 64 || text.find_first_not_of("0123456789abcdef") != std::string_view::npos)
    throw FormatError(concat(where, ": expected 64 hexadecimal digits, found ", in_quotes(text)));
  Sha256Sum sum;
  for (size_t i = 0; i < sum.size(); ++i)
    sum[i] = static_cast<uint8_t>(value(text[2 * i]) << 4 | value(text[2 * i + 1]));
  return sum;
}

}  // namespace moeflux
