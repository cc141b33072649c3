// Rows of x to digits, and codes to bytes in the same order of columns. AVX-512 BW.
#include "kernels/cpu/codes.h"
#include "kernels/cpu/digits.h"

namespace moeflux::cpu::MOEFLUX_ISA {

// The two halves of the bytes of a block: even places, then odd ones.
MOEFLUX_INLINE __m512i even_then_odd(__m512i bytes) {
  const __m512i within = _mm512_set4_epi32(0x0f0d0b09, 0x07050301, 0x0e0c0a08, 0x06040200);
  const __m512i across = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  return _mm512_maskz_permutexvar_epi64(0xff, across, _mm512_shuffle_epi8(bytes, within));
}

// ---- Rows of x -----------------------------------------------------------------------------------------------------

struct DigitRow {
  const uint8_t* digits;
  const float* units;
  const float* sums;
};

MOEFLUX_INLINE DigitRow digit_row(const uint8_t* row, int64_t columns, int64_t group_size) {
  const float* units = reinterpret_cast<const float*>(row + digit_blocks(columns) * digit_block_bytes);
  return {row, units, units + digit_groups(columns, group_size)};
}

// The sum, or the largest, of 16 whole numbers.
template <bool add>
MOEFLUX_INLINE int32_t reduce_whole(__m512i value) {
  Ints v = (Ints)value;
  v = merge<add, Ints>(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = merge<add, Ints>(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = merge<add, Ints>(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = merge<add, Ints>(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return v[0];
}

// Of the unit of a group, as the bits of an f32 have it: the least with which the largest number is below 2^23 units,
// by a margin that leaves the high digit room for what the others hand up, and all of them together below 2^27 units.
MOEFLUX_INLINE int exponent_of_unit(int largest_bits, float sum_of_sizes) {
  float largest;
  __builtin_memcpy(&largest, &largest_bits, sizeof largest);
  const auto exponent = [](float value) __attribute__((always_inline)) {
    int bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits >> 23;
  };
  int of_sum = exponent(sum_of_sizes);
  if (of_sum == 255) of_sum += 7;  // it has overflown; no sum of 128 numbers is larger
  const int for_largest = exponent(largest * 0x1.02p0f) - 22;
  const int for_sum = of_sum - 26;
  const int least = for_largest > for_sum ? for_largest : for_sum;
  return least < 1 ? 1 : least > 236 ? 236 : least;
}

// One group of `size` numbers to digits in the order of the columns, `digit_stride` bytes between high, middle and low.
template <int64_t size>
MOEFLUX_INLINE void convert_group(const float* x, uint8_t* digits, int64_t digit_stride, float* unit, float* x_sum) {
  constexpr int64_t vectors = size / 16;
  __m512 numbers[vectors];
  __m512 sizes = _mm512_setzero_ps();
  __m512i largest = _mm512_setzero_si512();
  MOEFLUX_UNROLL
  for (int64_t v = 0; v < vectors; ++v) {
    numbers[v] = _mm512_loadu_ps(x + v * 16);
    const __m512i bits = _mm512_and_si512((__m512i)numbers[v], _mm512_set1_epi32(0x7fffffff));
    largest = _mm512_maskz_max_epi32(all_lanes, largest, bits);
    sizes = _mm512_add_ps(sizes, (__m512)bits);
  }
  const int largest_bits = reduce_whole<false>(largest);
  const int unit_exponent = exponent_of_unit(largest_bits, sum((Floats)sizes));
  const int unit_bits = unit_exponent << 23;
  const __m512 inverse = (__m512)_mm512_set1_epi32((254 - unit_exponent) << 23);
  __m512i total = _mm512_setzero_si512();
  MOEFLUX_UNROLL
  for (int64_t v = 0; v < vectors; ++v) {
    const __m512i q = _mm512_maskz_cvtps_epi32(all_lanes, _mm512_mul_ps(numbers[v], inverse));
    total = _mm512_add_epi32(total, q);
    // What is kept of each is its low byte, as a number of -128 ... 127; half of the base goes to the next digit.
    const __m512i half = _mm512_set1_epi32(128);
    const __m512i upper = _mm512_maskz_srai_epi32(all_lanes, _mm512_add_epi32(q, half), 8);
    const __m512i high = _mm512_maskz_srai_epi32(all_lanes, _mm512_add_epi32(upper, half), 8);
    store(digits + v * 16, _mm512_maskz_cvtepi32_epi8(all_lanes, high));
    store(digits + v * 16 + digit_stride, _mm512_maskz_cvtepi32_epi8(all_lanes, upper));
    store(digits + v * 16 + 2 * digit_stride, _mm512_maskz_cvtepi32_epi8(all_lanes, q));
  }
  __builtin_memcpy(unit, &unit_bits, sizeof *unit);
  if (largest_bits >= 0x7f800000) *unit = __builtin_nanf("");
  *x_sum = *unit * static_cast<float>(reduce_whole<true>(total));
}

template <int64_t size>
static void convert_row(const float* x, int64_t columns, uint8_t* row) {
  constexpr int64_t span = size < digit_block ? digit_block : size;  // whole groups and whole blocks
  const DigitRow to = digit_row(row, columns, size);
  float* units = const_cast<float*>(to.units);
  float* sums = const_cast<float*>(to.sums);
  const int64_t groups = columns / size;
  for (int64_t g = groups; g < digit_groups(columns, size); ++g) units[g] = sums[g] = 0;
  for (int64_t column = 0; column < columns; column += span) {
    alignas(64) uint8_t digits[3][span];
    if (columns - column < span) __builtin_memset(digits, 0, sizeof digits);
    for (int64_t at = 0; at < span && column + at < columns; at += size) {
      const int64_t g = (column + at) / size;
      convert_group<size>(x + column + at, digits[0] + at, span, units + g, sums + g);
    }
    uint8_t* block = row + column / digit_block * digit_block_bytes;
    for (int64_t at = 0; at < span; at += digit_block, block += digit_block_bytes) {
      for (int64_t digit = 0; digit < 3; ++digit)
        store(block + digit * digit_block, even_then_odd(load<__m512i>(digits[digit] + at)));
    }
  }
}

static void convert_to_digits(const float* x, int64_t columns, int64_t group_size, uint8_t* digits) {
  if (group_size == 32) return convert_row<32>(x, columns, digits);
  if (group_size == 64) return convert_row<64>(x, columns, digits);
  return convert_row<128>(x, columns, digits);
}

// ---- Codes ---------------------------------------------------------------------------------------------------------

// The codes of a block as bytes; reads 8 * bits bytes.
template <int bits>
MOEFLUX_INLINE __m512i codes_of(const uint8_t* from) {
  if constexpr (bits == 4) {
    const __m512i twice = _mm512_maskz_broadcast_i64x4(0xff, load<__m256i>(from));
    const __m512i shifts = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4);
    return _mm512_and_si512(_mm512_maskz_srlv_epi32(all_lanes, twice, shifts), _mm512_set1_epi8(15));
  } else if constexpr (bits == 2) {
    // A byte a word holds the columns 4i ... 4i + 3: the even ones are taken from it, from it shifted by 2 the odd
    // ones.
    const __m512i twice = _mm512_maskz_broadcast_i64x4(0xff, _mm256_cvtepu8_epi16(load<__m128i>(from)));
    const __m512i shifts = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2);
    const __m512i first = _mm512_maskz_srlv_epi32(all_lanes, twice, shifts);
    const __m512i second = _mm512_maskz_slli_epi32(all_lanes, first, 4);
    return _mm512_and_si512(_mm512_or_si512(first, second), _mm512_set1_epi8(3));
  } else {
    uint8_t halves[2][stretch];
    codes_to_bytes<bits>(from, halves[0]);
    codes_to_bytes<bits>(from + stretch * bits / 8, halves[1]);
    const __m512i low = _mm512_castsi256_si512(load<__m256i>(halves[0]));
    return even_then_odd(_mm512_maskz_inserti64x4(0xff, low, load<__m256i>(halves[1]), 1));
  }
}

// The same where only the first `columns` of the block are there: zeros behind them.
template <int bits>
MOEFLUX_INLINE __m512i codes_of(const uint8_t* from, int64_t columns) {
  if (columns >= digit_block) return codes_of<bits>(from);
  uint8_t rest[digit_block * bits / 8] = {};
  __builtin_memcpy(rest, from, static_cast<size_t>(columns * bits / 8));
  return codes_of<bits>(rest);
}

}  // namespace moeflux::cpu::MOEFLUX_ISA
