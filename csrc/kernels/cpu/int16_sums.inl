// Products of digits and codes (see int16.h) with AVX-512, for one row of x: the sums of 16 rows of the matrix over 128
// columns. A vector holds parts of one row's sum, and the vectors of sixteen rows are added up together.
#if defined(__AVX512VNNI__)
#include "kernels/cpu/int16_dots.inl"
#else
#include "kernels/cpu/int16_pairs.inl"
#endif

namespace moeflux::cpu::MOEFLUX_ISA {

// ---- Sums of 16 matrix rows ----------------------------------------------------------------------------------------

// The sums of a block: a vector for each group, a lane for each matrix row.
template <int64_t group_size>
using BlockSums = __m512i[int16_block / group_size];

// v[i] are the sums of rows 4 * i ... 4 * i + 3.
template <int64_t group_size>
MOEFLUX_INLINE void sums_of_groups(const __m512i (&v)[4], BlockSums<group_size>& sums) {
  if constexpr (group_size == 32) {
    MOEFLUX_UNROLL
    for (int i = 0; i < 4; ++i) sums[i] = v[i];
    turn_quarters(sums);
  } else {
    const __m512i first = _mm512_add_epi32(quarters<0x88>(v[0], v[1]), quarters<0xdd>(v[0], v[1]));
    const __m512i second = _mm512_add_epi32(quarters<0x88>(v[2], v[3]), quarters<0xdd>(v[2], v[3]));
    const __m512i low = quarters<0x88>(first, second);
    const __m512i high = quarters<0xdd>(first, second);
    if constexpr (group_size == 64) {
      sums[0] = low;
      sums[1] = high;
    } else {
      sums[0] = _mm512_add_epi32(low, high);
    }
  }
}

// What is prefetched goes to the second-level cache, far ahead and in the order of memory, and from there to the first,
// just before it is multiplied. Most of the lines of a row are far from those of the next, so the processor does not
// see by itself which comes.
//
// Sixteen rows of 4 bits mostly fit in half of the first cache. With one row of x, the next sixteen go to both caches
// in the order of memory, which some processors read faster than sixteen rows side by side.
template <int bits>
constexpr bool come_in_order = width_of(bits) == 4;
template <int bits>
constexpr int64_t far_behind = come_in_order<bits> ? 12288 : 0;  // bytes, of what goes to the second-level cache

// Cache lines that are asked for of a block of one row, if it begins on one. The last is not, if the block has eight
// bytes of it or fewer: the next block asks for it, too.
template <int bits>
constexpr int64_t lines_of_block = (bytes_of_128(bits) + 55) / 64;

// The last byte of the block after block b in each of sixteen rows, where `rows` are at that one; after the last block,
// of the first in the next sixteen rows. Without a place there, it is still a place that may be prefetched.
template <int bits>
MOEFLUX_INLINE SpacedRows next_block(const Weights& w, SpacedRows rows, int64_t b, int64_t blocks) {
  constexpr int64_t block_bytes = bytes_of_128(bits);
  rows.first += b + 1 < blocks ? 2 * block_bytes - 1 : code_rows * w.code_stride - (blocks - 2) * block_bytes - 1;
  return rows;
}

// Otherwise a row is so many instructions that sixteen are a loop.
template <int bits>
constexpr bool taken_apart_quickly = bits == 2 || bits == 8 || width_of(bits) == 4 || are_in_blocks(bits);

// Groups of 16 columns: v[i] are the sums of rows 2 * i and 2 * i + 1.
MOEFLUX_INLINE void sums_of_pairs(const __m512i (&v)[code_rows / 2], BlockSums<16>& sums) {
  MOEFLUX_UNROLL
  for (int odd = 0; odd < 2; ++odd) {
    __m512i groups[4];  // of two in a stretch, this one
    MOEFLUX_UNROLL
    for (int i = 0; i < 4; ++i) {
      const __m512 first = (__m512)v[2 * i];
      const __m512 second = (__m512)v[2 * i + 1];
      groups[i] = (__m512i)(odd ? _mm512_maskz_shuffle_ps(all_lanes, first, second, 0xdd)
                                : _mm512_maskz_shuffle_ps(all_lanes, first, second, 0x88));
    }
    turn_quarters(groups);
    MOEFLUX_UNROLL
    for (int i = 0; i < 4; ++i) sums[2 * i + odd] = groups[i];
  }
}

// The order in which codes of a row are multiplied.
template <int bits, int64_t group_size>
constexpr Order order_of = [] {
  if (!are_in_blocks(bits) || group_size == 16) return Order::parity;
  const BlockType type = block_type_of(bits);
  return type == BlockType::q4_k || type == BlockType::q5_k ? Order::eights : Order::halves;
}();

// Groups of 32 columns of which two are in each quarter: v[i] are the sums of rows 2 * i and 2 * i + 1.
MOEFLUX_INLINE void sums_of_eights(const __m512i (&v)[code_rows / 2], BlockSums<32>& sums) {
  __m512i four[4];  // rows: the first two groups of each row are in one quarter, the other two in the next
  MOEFLUX_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m512i a = v[i / 2 * 4 + i % 2];
    const __m512i b = v[i / 2 * 4 + i % 2 + 2];
    four[i] = _mm512_add_epi32(quarters<0x88>(a, b), quarters<0xdd>(a, b));
  }
  MOEFLUX_UNROLL
  for (int second = 0; second < 2; ++second) {
    __m512i halves[2];
    MOEFLUX_UNROLL
    for (int i = 0; i < 2; ++i) {
      const __m512 a = (__m512)four[2 * i];
      const __m512 b = (__m512)four[2 * i + 1];
      halves[i] = (__m512i)(second ? _mm512_maskz_shuffle_ps(all_lanes, a, b, 0xdd)
                                   : _mm512_maskz_shuffle_ps(all_lanes, a, b, 0x88));
    }
    sums[second] = quarters<0x88>(halves[0], halves[1]);
    sums[second + 2] = quarters<0xdd>(halves[0], halves[1]);
  }
}

// All groups of a block. Larger ones are whole stretches.
template <int bits, int64_t group_size, typename SumsOfTwo>
MOEFLUX_INLINE void sums_of_rows(const SumsOfTwo& sums_of_two, BlockSums<group_size>& sums) {
  __m512i of_two[code_rows / 2];
  __m512i v[code_rows / 4];
  if constexpr (!taken_apart_quickly<bits>)
    for (int64_t r = 0; r < code_rows; r += 2) of_two[r / 2] = sums_of_two(r);
  MOEFLUX_UNROLL
  for (int64_t r = 0; r < code_rows; r += 2) {
    // Rows are added up as they come: their shuffles have another unit than the products, and both go side by side.
    if constexpr (taken_apart_quickly<bits>) of_two[r / 2] = sums_of_two(r);
    if (group_size > 16 && order_of<bits, group_size> != Order::eights && r % 4 == 2)
      v[r / 4] = sums_of_neighbours(of_two[r / 2 - 1], of_two[r / 2]);
  }
  if constexpr (group_size == 16)
    sums_of_pairs(of_two, sums);
  else if constexpr (order_of<bits, group_size> == Order::eights)
    sums_of_eights(of_two, sums);
  else
    sums_of_groups<group_size>(v, sums);
}

// Sums of code * q over a block, of which `left` columns are there, or all if it is `whole`. `half` says which half of
// blocks of 256 columns it is. `take` gets a function that makes those of two rows
// (see of_two_rows). Meanwhile it prefetches the cache lines at `target`, some of them with each row, and,
// unless codes come in order, those that end with the bytes that `next` has. If all lines were asked for at once, they
// would wait for each other, and the multiplications with them. So they go one after the other, each tied to the
// numbers that are being multiplied.
template <int bits, Order order, bool whole, typename Take>
MOEFLUX_INLINE void sums_of_block(const uint8_t* digits, const SpacedRows& rows, int64_t half, int64_t left,
                                  const uint8_t* target, const SpacedRows& next, const Take& take) {
  constexpr int64_t lines = bytes_of_128(bits) / 4;  // as many as 16 blocks have
  const BlockDigits<bits, order> x(digits);
  const auto codes_of_row = [&](int64_t r) __attribute__((always_inline)) {
    return whole ? codes_at<bits, order>(rows.row(r), half) : codes_at<bits, order>(rows.row(r), half, left);
  };
  const auto ask = [&](int64_t r, __m512i& sum) __attribute__((always_inline)) {
    for (int64_t i = r * lines / code_rows; i < (r + 1) * lines / code_rows; ++i) {
      if constexpr (come_in_order<bits>) asm volatile("prefetcht0 %1" : "+v"(sum) : "m"(target[i * 64]));
      asm volatile("prefetcht1 %1" : "+v"(sum) : "m"(target[i * 64 + far_behind<bits>]));
    }
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < lines_of_block<bits> && !come_in_order<bits>; ++i)
      asm volatile("prefetcht0 %1" : "+v"(sum) : "m"(next.row(r)[-i * 64]));
  };
  const auto sums_of_two = [&](int64_t r, __m512i start)
                               __attribute__((always_inline)) { return x.sums_of_two(r, start, codes_of_row, ask); };
  take(sums_of_two);
}

// The same, as a vector for each group.
template <int bits, int64_t group_size, bool whole>
MOEFLUX_INLINE void group_sums_of_block(const uint8_t* digits, const SpacedRows& rows, int64_t half, int64_t left,
                                        const uint8_t* target, const SpacedRows& next, BlockSums<group_size>& sums) {
  sums_of_block<bits, order_of<bits, group_size>, whole>(
      digits, rows, half, left, target, next, [&](const auto& sums_of_two) __attribute__((always_inline)) {
        const auto from_zero = [&](int64_t r)
                                   __attribute__((always_inline)) { return sums_of_two(r, _mm512_setzero_si512()); };
        sums_of_rows<bits, group_size>(from_zero, sums);
      });
}

// The same for the last block of a row that ends within it. It stays out of the loop, which would share its addresses.
template <int bits, int64_t group_size>
[[gnu::noinline]] static void sums_of_part(const uint8_t* digits, const SpacedRows& rows, int64_t half, int64_t left,
                                           const uint8_t* target, const SpacedRows& next, BlockSums<group_size>& sums) {
  group_sums_of_block<bits, group_size, false>(digits, rows, half, left, target, next, sums);
}

}  // namespace moeflux::cpu::MOEFLUX_ISA
