// Products of digits and codes (see int16.h) with AVX-512 VNNI: 4 products of bytes per lane and instruction.
#include "kernels/cpu/int16_scales.inl"

namespace moeflux::cpu::MOEFLUX_ISA {

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

// ---- One row of x --------------------------------------------------------------------------------------------------

// Parts of a row's sums over a block: what its codes give with the high digits, and with the low ones. Where these do
// not fit in 16 bits, `low` has 256 * high + low.
struct DigitSums {
  __m512i high;
  __m512i low;
};

template <int bits>
constexpr bool sums_fit_16_bits = 8 * largest_code<bits> * 128 < 32768;  // 8 products with digits

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

// A product waits for the one that it is added to. Where codes are many instructions, those of two rows go in turn; 4
// bits in affine groups are slower so.
template <int bits>
constexpr bool go_in_turn = sums_fit_16_bits<bits> && (are_in_blocks(bits) || bits == e2m1);

// What a block of a row of x is multiplied as.
template <int bits, Order order>
struct BlockDigits {
  BlockCodes high_digits;
  BlockCodes low_digits;

  [[gnu::always_inline]] explicit BlockDigits(const uint8_t* digits)
      : high_digits(digits_of_block<order>(digits)), low_digits(digits_of_block<order>(digits + int16_block)) {}

  // `start` + the sums of rows r and r + 1. `codes_of_row` makes their codes, and `ask` prefetches.
  template <typename CodesOfRow, typename Ask>
  [[gnu::always_inline]] __m512i sums_of_two(int64_t r, __m512i start, const CodesOfRow& codes_of_row,
                                             const Ask& ask) const {
    const __m512i zero = _mm512_setzero_si512();
    const auto sums_of_row = [&](int64_t row) __attribute__((always_inline)) {
      const BlockCodes codes = codes_of_row(row);
      __m512i high = dot(dot(zero, codes.even, high_digits.even), codes.odd, high_digits.odd);
      ask(row, high);
      const __m512i above = sums_fit_16_bits<bits> ? zero : _mm512_maskz_slli_epi32(all_lanes, high, 8);
      return DigitSums{high, dot(dot(above, codes.even, low_digits.even), codes.odd, low_digits.odd)};
    };
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
  }
};

// ---- Several rows of x ---------------------------------------------------------------------------------------------

// The block at `digits` of `n` rows of x, of which four columns at a time go to all lanes.
template <int64_t n>
struct BlocksForAll {
  const uint8_t* digits[n];

  [[gnu::always_inline]] void set(int64_t i, const uint8_t* block) {
    digits[i] = block;
    asm("" : "+r"(digits[i]));  // otherwise GCC 12 makes an address for each product, and stores them
  }
};

// Sums over a group.
template <int64_t n>
struct GroupSums {
  static constexpr int64_t chains = n <= 2 ? 2 : 1;  // of each sum: products of one chain wait for each other
  __m512i sums[2][chains][n] = {};

  // The k-th four even columns of the block, and the odd ones beside them.
  [[gnu::always_inline]] void add(const BlocksForAll<n>& x, int64_t k, const BlockCodes& word) {
    MOEFLUX_UNROLL
    for (int64_t digit = 0; digit < 2; ++digit) {
      MOEFLUX_UNROLL
      for (int64_t i = 0; i < n; ++i) {
        const uint8_t* four = x.digits[i] + digit * int16_block + k * 4;
        __m512i& of_even = sums[digit][0][i];
        of_even = dot_everywhere(of_even, word.even, four);
        __m512i& of_odd = sums[digit][chains - 1][i];
        of_odd = dot_everywhere(of_odd, word.odd, four + 64);
      }
    }
  }

  [[gnu::always_inline]] __m512i of(int64_t i) const {
    __m512i high = sums[0][0][i];
    __m512i low = sums[1][0][i];
    if constexpr (chains == 2) {
      high = _mm512_add_epi32(high, sums[0][1][i]);
      low = _mm512_add_epi32(low, sums[1][1][i]);
    }
    return _mm512_add_epi32(_mm512_maskz_slli_epi32(all_lanes, high, 8), low);
  }
};

}  // namespace moeflux::cpu::MOEFLUX_ISA
