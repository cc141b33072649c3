// Products of digits and codes (see int16.h) with AVX-512 without VNNI. An instruction that adds up products of bytes
// in pairs saturates at 16 bits. So digits are multiplied only where no sum of four products can get there. Codes of
// more bits become words and meet whole numbers of x, not digits: pairs of such products are added up in 32 bits.
#include "kernels/cpu/int16_scales.inl"

namespace moeflux::cpu::MOEFLUX_ISA {

// ---- Words ---------------------------------------------------------------------------------------------------------

// Every second byte of a vector, and those between, as words.
struct WordsOfBytes {
  __m512i first;
  __m512i second;
};

MOEFLUX_INLINE WordsOfBytes words_of_codes(__m512i codes) {
  return {_mm512_and_si512(codes, _mm512_set1_epi16(255)), _mm512_srli_epi16(codes, 8)};
}

// 256 * high + low.
MOEFLUX_INLINE WordsOfBytes words_of_digits(__m512i high, __m512i low) {
  const __m512i first = _mm512_srai_epi16(_mm512_slli_epi16(low, 8), 8);
  const __m512i second = _mm512_srai_epi16(low, 8);
  return {_mm512_add_epi16(_mm512_slli_epi16(high, 8), first),
          _mm512_add_epi16(_mm512_and_si512(high, _mm512_set1_epi16(~255)), second)};
}

MOEFLUX_INLINE __m512i products(const WordsOfBytes& codes, const WordsOfBytes& x) {
  return _mm512_add_epi32(_mm512_madd_epi16(codes.first, x.first), _mm512_madd_epi16(codes.second, x.second));
}

// ---- One row of x --------------------------------------------------------------------------------------------------

template <int bits>
constexpr bool sums_fit_16_bits = 4 * largest_code<bits> * 128 < 32768;  // 4 products with digits

// What a block of a row of x is multiplied as.
template <int bits, Order order>
struct BlockDigits {
  BlockCodes high_digits;
  BlockCodes low_digits;
  WordsOfBytes even;
  WordsOfBytes odd;

  [[gnu::always_inline]] explicit BlockDigits(const uint8_t* digits)
      : high_digits(digits_of_block<order>(digits)),
        low_digits(digits_of_block<order>(digits + int16_block)),
        even(words_of_digits(high_digits.even, low_digits.even)),
        odd(words_of_digits(high_digits.odd, low_digits.odd)) {}

  [[gnu::always_inline]] __m512i of_row(const BlockCodes& codes) const {
    if constexpr (sums_fit_16_bits<bits>) {
      const auto of_digits = [&](const BlockCodes& x) __attribute__((always_inline)) {
        return _mm512_add_epi16(_mm512_maddubs_epi16(codes.even, x.even), _mm512_maddubs_epi16(codes.odd, x.odd));
      };
      return _mm512_add_epi32(_mm512_madd_epi16(of_digits(high_digits), _mm512_set1_epi16(256)),
                              _mm512_madd_epi16(of_digits(low_digits), _mm512_set1_epi16(1)));
    } else {
      return _mm512_add_epi32(products(words_of_codes(codes.even), even), products(words_of_codes(codes.odd), odd));
    }
  }

  // `start` + the sums of rows r and r + 1. `codes_of_row` makes their codes, and `ask` prefetches.
  template <typename CodesOfRow, typename Ask>
  [[gnu::always_inline]] __m512i sums_of_two(int64_t r, __m512i start, const CodesOfRow& codes_of_row,
                                             const Ask& ask) const {
    __m512i a = of_row(codes_of_row(r));
    ask(r, a);
    __m512i b = of_row(codes_of_row(r + 1));
    ask(r + 1, b);
    return _mm512_add_epi32(start, sums_of_neighbours(a, b));
  }
};

// ---- Several rows of x ---------------------------------------------------------------------------------------------

// A block of `n` rows of x as whole numbers, of which two at a time go to all lanes.
template <int64_t n>
struct BlocksForAll {
  alignas(64) int32_t pairs[n][2][2][int16_block / 8];  // of even and of odd columns: every second one, and the others

  // Four columns become the first and third, and the second and fourth.
  [[gnu::always_inline]] void set(int64_t i, const uint8_t* digits) {
    MOEFLUX_UNROLL
    for (int odd = 0; odd < 2; ++odd) {
      const WordsOfBytes words =
          words_of_digits(load<__m512i>(digits + odd * 64), load<__m512i>(digits + 128 + odd * 64));
      store(pairs[i][odd][0], words.first);
      store(pairs[i][odd][1], words.second);
    }
    asm("" : "+m"(pairs));  // from memory, all lanes get one of them for nothing
  }
};

// Sums over a group.
template <int64_t n>
struct GroupSums {
  __m512i sums[n] = {};

  // The k-th four even columns of the block, and the odd ones beside them.
  [[gnu::always_inline]] void add(const BlocksForAll<n>& x, int64_t k, const BlockCodes& word) {
    const WordsOfBytes codes[2] = {words_of_codes(word.even), words_of_codes(word.odd)};
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < n; ++i) MOEFLUX_UNROLL
    for (int odd = 0; odd < 2; ++odd) {
      const WordsOfBytes four = {_mm512_set1_epi32(x.pairs[i][odd][0][k]), _mm512_set1_epi32(x.pairs[i][odd][1][k])};
      sums[i] = _mm512_add_epi32(sums[i], products(codes[odd], four));
    }
  }

  [[gnu::always_inline]] __m512i of(int64_t i) const { return sums[i]; }
};

}  // namespace moeflux::cpu::MOEFLUX_ISA
