// Turns rows of x into digits, and codes into bytes in the same order of columns. It takes AVX-512 BW.
#include "kernels/cpu/codes.h"
#include "kernels/cpu/int16_layout.inl"
#include "kernels/cpu/lanes.h"

namespace moeflux::cpu::MOEFLUX_ISA {

// ---- Lanes ---------------------------------------------------------------------------------------------------------

// Quarters of two vectors, as _mm512_shuffle_i32x4 chooses them.
template <int choice>
MOEFLUX_INLINE __m512i quarters(__m512i a, __m512i b) {
  return _mm512_maskz_shuffle_i32x4(all_lanes, a, b, choice);
}

// Transposes 4 vectors of 4 quarters: quarter q of vector i becomes quarter i of vector q.
MOEFLUX_INLINE void turn_quarters(__m512i (&v)[4]) {
  const __m512i first_low = quarters<0x44>(v[0], v[1]);
  const __m512i first_high = quarters<0xee>(v[0], v[1]);
  const __m512i second_low = quarters<0x44>(v[2], v[3]);
  const __m512i second_high = quarters<0xee>(v[2], v[3]);
  v[0] = quarters<0x88>(first_low, second_low);
  v[1] = quarters<0xdd>(first_low, second_low);
  v[2] = quarters<0x88>(first_high, second_high);
  v[3] = quarters<0xdd>(first_high, second_high);
}

// ---- Rows of x -----------------------------------------------------------------------------------------------------

// Turns the numbers of a group, 16 in each vector, into whole numbers of units.
template <int64_t vectors>
MOEFLUX_INLINE void convert_group(const __m512* numbers, __m512i* whole, float* unit, float* x_sum,
                                  int32_t* whole_sum) {
  __m512i largest = _mm512_setzero_si512();
  MOEFLUX_UNROLL
  for (int64_t v = 0; v < vectors; ++v) {
    const __m512i bits = _mm512_and_si512((__m512i)numbers[v], _mm512_set1_epi32(0x7fffffff));
    largest = _mm512_maskz_max_epi32(all_lanes, largest, bits);
  }
  const Unit of_group = unit_of(reduce_whole<false>(largest));
  const __m512 inverse = _mm512_set1_ps(of_group.inverse);
  __m512i total = _mm512_setzero_si512();
  MOEFLUX_UNROLL
  for (int64_t v = 0; v < vectors; ++v) {
    whole[v] = _mm512_maskz_cvtps_epi32(all_lanes, _mm512_mul_ps(numbers[v], inverse));
    total = _mm512_add_epi32(total, whole[v]);
  }
  *unit = of_group.unit;
  *whole_sum = reduce_whole<true>(total);
  *x_sum = *unit * static_cast<float>(*whole_sum);
}

// Turns the whole numbers of a block into its digits.
MOEFLUX_INLINE void store_digits(const __m512i (&whole)[8], uint8_t* block) {
  // Each quarter has 8 columns of a stretch: 4i ... 4i + 3, and the same plus 16. First come their high digits, those
  // of even columns before those of odd ones, and then the low digits.
  const __m512i by_digit =
      _mm512_maskz_broadcast_i32x4(all_lanes, _mm_setr_epi8(1, 5, 9, 13, 3, 7, 11, 15, 0, 4, 8, 12, 2, 6, 10, 14));
  // Digits of the same kind come together, in the order of the columns.
  alignas(64) static constexpr uint16_t by_column[32] = {0, 8,  16, 24, 1, 9,  17, 25, 2, 10, 18, 26, 3, 11, 19, 27,
                                                         4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31};
  __m512i stretches[4];
  MOEFLUX_UNROLL
  for (int s = 0; s < 4; ++s) {
    const __m512i q = _mm512_packs_epi32(whole[2 * s], whole[2 * s + 1]);
    // The low digit is the low byte, as a number of -128 ... 127. Adding half of the base first rounds the high digit
    // to match.
    const __m512i upper = _mm512_add_epi16(q, _mm512_set1_epi16(128));
    const __m512i bytes = _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, q, upper);
    stretches[s] =
        _mm512_maskz_permutexvar_epi16(0xffffffff, load<__m512i>(by_column), _mm512_shuffle_epi8(bytes, by_digit));
  }
  turn_quarters(stretches);
  MOEFLUX_UNROLL
  for (int i = 0; i < 4; ++i) store(block + i * 64, stretches[i]);
}

template <int64_t group_size>
static void convert_row(const float* x, int64_t columns, uint8_t* row) {
  constexpr int64_t vectors = group_size / 16;
  const DigitRow to = digit_row(row, columns, group_size);
  float* units = const_cast<float*>(to.units);
  float* sums = const_cast<float*>(to.sums);
  int32_t* whole_sums = const_cast<int32_t*>(to.whole_sums);
  for (int64_t column = 0; column < columns; column += int16_block, row += int16_block_bytes) {
    __m512i whole[8];
    MOEFLUX_UNROLL
    for (int64_t at = 0; at < 8; at += vectors) {
      if (column + at * 16 < columns) {
        __m512 numbers[vectors];
        MOEFLUX_UNROLL
        for (int64_t v = 0; v < vectors; ++v) numbers[v] = _mm512_loadu_ps(x + column + (at + v) * 16);
        convert_group<vectors>(numbers, whole + at, units++, sums++, whole_sums++);
      } else {
        MOEFLUX_UNROLL
        for (int64_t v = 0; v < vectors; ++v) whole[at + v] = _mm512_setzero_si512();
        *units++ = *sums++ = 0;
        *whole_sums++ = 0;
      }
    }
    store_digits(whole, row);
  }
}

static void convert_to_int16(const float* x, int64_t columns, int64_t group_size, uint8_t* digits) {
  if (group_size == 16) return convert_row<16>(x, columns, digits);
  if (group_size == 32) return convert_row<32>(x, columns, digits);
  if (group_size == 64) return convert_row<64>(x, columns, digits);
  return convert_row<128>(x, columns, digits);
}

// ---- Codes ---------------------------------------------------------------------------------------------------------

// The codes of a block as bytes: the 16 even columns of each stretch, and the odd ones. Or, where that takes less and
// the digits are put in the same order, the first 16 columns of each stretch, and the last; or, of each, eight columns
// of one stretch beside eight of another, so that a quarter has parts of two groups.
struct BlockCodes {
  __m512i even;
  __m512i odd;
};

enum class Order { parity, halves, eights };

// Of codes that are bytes already, in the order of the columns: in each quarter those of the even columns come first.
MOEFLUX_INLINE __m512i even_before_odd(__m512i codes) {
  const __m512i within =
      _mm512_maskz_broadcast_i32x4(all_lanes, _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
  return _mm512_shuffle_epi8(codes, within);
}

MOEFLUX_INLINE BlockCodes even_and_odd(__m512i first, __m512i second) {
  first = even_before_odd(first);
  second = even_before_odd(second);
  return {_mm512_maskz_permutex2var_epi64(0xff, first, _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14), second),
          _mm512_maskz_permutex2var_epi64(0xff, first, _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15), second)};
}

// 12 more than twice what codes of E2M1 stand for: a byte each.
MOEFLUX_INLINE __m512i raised(__m512i codes) {
  const __m512i numbers =
      _mm512_maskz_broadcast_i32x4(all_lanes, _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  return _mm512_shuffle_epi8(numbers, codes);
}

// Of codes of 4 bits: the lower half of a byte is that of an even column.
template <int bits>
MOEFLUX_INLINE BlockCodes halves_of_bytes(__m512i both) {
  const __m512i low = _mm512_set1_epi8(15);
  const __m512i even = _mm512_and_si512(both, low);
  const __m512i odd = _mm512_and_si512(_mm512_maskz_srli_epi32(all_lanes, both, 4), low);
  if constexpr (bits == e2m1) return {raised(even), raised(odd)};
  return {even, odd};
}

// Reads 16 * bits bytes.
template <int bits>
MOEFLUX_INLINE BlockCodes codes_of(const uint8_t* from) {
  if constexpr (bits == 4 || bits == e2m1) {
    __m512i both = load<__m512i>(from);
    asm("" : "+v"(both));  // otherwise GCC 12 loads it twice, or keeps it in memory
    return halves_of_bytes<bits>(both);
  } else if constexpr (bits == 2) {
    // The low byte of each word holds 4 columns. A copy that is moved up by 4 bits brings the third and fourth into the
    // upper byte.
    const __m512i four = _mm512_cvtepu8_epi16(load<__m256i>(from));
    const __m512i both = _mm512_or_si512(four, _mm512_maskz_slli_epi32(all_lanes, four, 4));
    const __m512i low = _mm512_set1_epi8(3);
    return {_mm512_and_si512(both, low), _mm512_and_si512(_mm512_maskz_srli_epi32(all_lanes, both, 2), low)};
  } else if constexpr (bits == 8) {
    return even_and_odd(load<__m512i>(from), load<__m512i>(from + 64));
  } else {
    __m512i halves[2];
    MOEFLUX_UNROLL
    for (int half = 0; half < 2; ++half, from += 8 * bits) {
      uint8_t codes[2][stretch];
      codes_to_bytes<bits>(from, codes[0]);
      codes_to_bytes<bits>(from + 4 * bits, codes[1]);
      halves[half] =
          _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(load<__m256i>(codes[0])), load<__m256i>(codes[1]), 1);
    }
    return even_and_odd(halves[0], halves[1]);
  }
}

// The same if only the first `columns` of the block are there. Zeros follow them.
template <int bits>
MOEFLUX_INLINE BlockCodes codes_of(const uint8_t* from, int64_t columns) {
  if (columns >= int16_block) return codes_of<bits>(from);
  uint8_t rest[int16_block * width_of(bits) / 8] = {};
  __builtin_memcpy(rest, from, static_cast<size_t>(columns * width_of(bits) / 8));
  return codes_of<bits>(rest);
}

}  // namespace moeflux::cpu::MOEFLUX_ISA
