// Products of digits and codes (see int16.h) with AVX-512 VNNI, for one row of x: the sums of 16 rows of the matrix
// over 128 columns. A vector holds parts of one row's sum, and the vectors of sixteen rows are added up together.
#include "kernels/cpu/int16_scales.inl"

namespace moeflux::cpu::MOEFLUX_ISA {

// ---- Sums of 16 matrix rows ----------------------------------------------------------------------------------------

// The sums of a block: a vector for each group, a lane for each matrix row.
template <int64_t group_size>
using BlockSums = __m512i[int16_block / group_size];

// As an intrinsic, GCC 12 copies many of the sums from register to register in between.
MOEFLUX_INLINE __m512i dot(__m512i sum, __m512i codes, __m512i digits) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(digits));
  return sum;
}

// The same with four digits for all lanes, from memory.
MOEFLUX_INLINE __m512i dot_everywhere(__m512i sum, __m512i codes, const uint8_t* digits) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*reinterpret_cast<const int32_t*>(digits)));
  return sum;
}

// Parts of a row's sums over a block: what its codes give with the high digits, and with the low ones. Where these do
// not fit in 16 bits, `low` has 256 * high + low.
struct DigitSums {
  __m512i high;
  __m512i low;
};

template <int bits>
constexpr bool sums_fit_16_bits = [] {  // 8 products of at most 31 and 128
  if (!are_in_blocks(bits)) return bits == e2m1 || bits <= 5;
  return width_of(bits) <= 5 && raised_of(block_type_of(bits)) < 128;
}();

// Sums of neighbouring lanes. Each quarter has two of a, and then two of b.
MOEFLUX_INLINE __m512i sums_of_neighbours(__m512i a, __m512i b) {
  const __m512 first = (__m512)a;
  const __m512 second = (__m512)b;
  return _mm512_add_epi32((__m512i)_mm512_maskz_shuffle_ps(all_lanes, first, second, 0x88),
                          (__m512i)_mm512_maskz_shuffle_ps(all_lanes, first, second, 0xdd));
}

// 256 * high + low of two rows. Each quarter has two parts of each row's sum over one stretch, which are the sums of 16
// columns each. Where digits' sums fit in 16 bits, two instructions put them together for both rows, and add them to
// `start`.
template <int bits>
MOEFLUX_INLINE __m512i of_two_rows(const DigitSums& a, const DigitSums& b, __m512i start) {
  if constexpr (sums_fit_16_bits<bits>) {
    const __m512i high = _mm512_maskz_packs_epi32(~__mmask32{0}, a.high, b.high);
    const __m512i low = _mm512_maskz_packs_epi32(~__mmask32{0}, a.low, b.low);
    const __m512i sum = _mm512_maskz_dpwssd_epi32(all_lanes, start, high, _mm512_set1_epi16(256));
    return _mm512_maskz_dpwssd_epi32(all_lanes, sum, low, _mm512_set1_epi16(1));
  } else {
    return sums_of_neighbours(a.low, b.low);
  }
}

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

// A product waits for the one that it is added to. Where codes are many instructions, those of two rows go in turn; 4
// bits in affine groups are slower so.
template <int bits>
constexpr bool go_in_turn = sums_fit_16_bits<bits> && (are_in_blocks(bits) || bits == e2m1);

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

// One digit of the columns of a block, in the order of its codes. Rows share what it takes to make another order.
template <Order order>
MOEFLUX_INLINE BlockCodes digits_of_block(const uint8_t* digits) {
  const __m512i even = load<__m512i>(digits);
  const __m512i odd = load<__m512i>(digits + 64);
  if constexpr (order == Order::parity) return {even, odd};
  constexpr __mmask64 all_bytes = ~__mmask64{0};
  const __m512i first = _mm512_maskz_unpacklo_epi8(all_bytes, even, odd);
  const __m512i last = _mm512_maskz_unpackhi_epi8(all_bytes, even, odd);
  if constexpr (order == Order::halves) return {first, last};
  const __m512i at = _mm512_setr_epi64(0, 2, 8, 10, 4, 6, 12, 14);
  return {_mm512_maskz_permutex2var_epi64(0xff, first, at, last),
          _mm512_maskz_permutex2var_epi64(0xff, first, _mm512_add_epi64(at, _mm512_set1_epi64(1)), last)};
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
  const BlockCodes high_digits = digits_of_block<order>(digits);
  const BlockCodes low_digits = digits_of_block<order>(digits + int16_block);
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
  const __m512i zero = _mm512_setzero_si512();
  const auto sums_of_row = [&](int64_t r) __attribute__((always_inline)) {
    const BlockCodes codes = codes_of_row(r);
    __m512i high = dot(dot(zero, codes.even, high_digits.even), codes.odd, high_digits.odd);
    ask(r, high);
    const __m512i above = sums_fit_16_bits<bits> ? zero : _mm512_maskz_slli_epi32(all_lanes, high, 8);
    return DigitSums{high, dot(dot(above, codes.even, low_digits.even), codes.odd, low_digits.odd)};
  };
  const auto sums_of_two = [&](int64_t r, __m512i start) __attribute__((always_inline)) {
    if constexpr (!go_in_turn<bits>) {
      const DigitSums first = sums_of_row(r);
      return of_two_rows<bits>(first, sums_of_row(r + 1), start);
    }
    const BlockCodes a = codes_of_row(r);
    const BlockCodes b = codes_of_row(r + 1);
    DigitSums first = {dot(zero, a.even, high_digits.even), dot(zero, a.even, low_digits.even)};
    DigitSums second = {dot(zero, b.even, high_digits.even), dot(zero, b.even, low_digits.even)};
    ask(r, first.high);
    ask(r + 1, second.high);
    first.high = dot(first.high, a.odd, high_digits.odd);
    second.high = dot(second.high, b.odd, high_digits.odd);
    first.low = dot(first.low, a.odd, low_digits.odd);
    second.low = dot(second.low, b.odd, low_digits.odd);
    return of_two_rows<bits>(first, second, start);
  };
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
