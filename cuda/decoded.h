// Matrices whose codes no tensor core multiplies: GGUF's blocks, NVFP4, and codes E4M3. A code becomes f32.
#pragma once
#include "operands.h"

// What blocks.h wants of the language.
#define MOEFLUX_INLINE DEV
typedef const u8* Bytes;
DEV u32 half_word_at(Bytes at) { return *reinterpret_cast<const u16*>(at); }
DEV u32 word_at(Bytes at) { return *reinterpret_cast<const u32*>(at); }
typedef uint2 TwoWords;
typedef uint4 FourWords;
DEV TwoWords two_words_at(Bytes at) { return *reinterpret_cast<const uint2*>(at); }
DEV FourWords four_words_at(Bytes at) { return *reinterpret_cast<const uint4*>(at); }
DEV float float_of(u32 bits) { return __uint_as_float(bits); }
DEV float f16_of(u32 bits) { return f16(u16(bits)); }
DEV u32 looked_up(u32 codes, u32 first, u32 second, u32 third, u32 fourth) {
  const u32 pairs = (codes | codes >> 4) & 0x00ff00ffu, together = (pairs | pairs >> 8) & 0x7777u;
  const u32 upper = (codes >> 3 & 0x01010101u) * 255u;
  return (__byte_perm(first, second, together) & ~upper) | (__byte_perm(third, fourth, together) & upper);
}
#include "blocks.h"

DEV constexpr bool is_decoded(u32 codes) { return is_in_blocks(codes) || codes == nvfp4 || codes == e4m3; }

// As f32, the bits of E4M3 have an exponent that is 120 too small, and a subnormal stays one.
DEV float float_of_e4m3(u32 code) { return __uint_as_float((code & 128u) << 24 | (code & 127u) << 20) * 0x1p120f; }

// A byte and what it is more than, as a difference of numbers that have it in their last bits.
DEV float float_of_byte(u32 bytes, u32 i, int zero) {
  return __uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7540u | i)) - float(0x800000 + zero);
}

// Eight weights of a row are weights[i] * scale + least. Few formats have a least, and for others it is 0.
struct Decoded {
  float weights[pack];
  float scale;
  float least;
};

template <u32 codes>
DEV constexpr bool has_least() {
  return codes == q4_1 || codes == q5_1 || codes == q2_k || codes == q4_k || codes == q5_k;
}

// `within`: the place of the column in its block, which a loop over columns need not compute again.
template <u32 codes>
DEV Decoded decoded_at(const StoredMatrix& matrix, const Storage& stored, u64 row, u32 column, u32 within) {
  Decoded result;
  result.least = 0.0f;
  if constexpr (is_in_blocks(codes)) {
    constexpr u32 wide = block_columns(codes);
    const u8* block = matrix.codes + (row * (stored.columns / wide) + column / wide) * block_bytes(codes);
    const EightCodes eight = codes_of_block<codes>(block, within);
    const BlockScale by = scale_of_block<codes>(block, within);
#pragma unroll
    for (u32 i = 0; i < pack; i++)
      result.weights[i] = float_of_byte(i < 4 ? eight.low : eight.high, i % 4, zero_code(codes));
    result.scale = by.scale;
    result.least = by.least;
  } else if constexpr (codes == nvfp4) {
    const u32 groups = stored.columns / 16, group = column / 16;
    const EightCodes eight = numbers_of_e2m1(
        nibbles_apart(word_at(matrix.codes + (row * (stored.columns / pack) + column / pack) * width_of(e2m1))));
#pragma unroll
    for (u32 i = 0; i < pack; i++)
      result.weights[i] = float_of_byte(i < 4 ? eight.low : eight.high, i % 4, e2m1_zero) * 0.5f;
    const u32 head = stored.number == number_e4m3_of_rows ? 4 : 0;
    const u8* scales = matrix.scales + row * (head + groups);
    result.scale = float_of_e4m3(scales[head + group]);
    if (head > 0) result.scale *= float_of(half_word_at(scales) | half_word_at(scales + 2) << 16);
  } else {
    const u32 shift = stored.number == number_u8 ? 5 : 7;  // of the columns that share a scale
    const u8* from = matrix.codes + row * stored.columns + column;
    const u32 low = word_at(from), high = word_at(from + 4);
#pragma unroll
    for (u32 i = 0; i < pack; i++) result.weights[i] = float_of_e4m3((i < 4 ? low : high) >> (i % 4 * 8));
    result.scale = number_at(matrix.scales, row * (stored.columns >> shift) + (column >> shift), stored.number);
  }
  return result;
}

template <u32 codes>
DEV u32 within_block(u32 column) {
  return is_in_blocks(codes) ? column % block_columns(codes) : 0;
}

// Instances for all of them: what their names end with, and what they are.
#define FOR_DECODED(instance)                                                                                    \
  instance(Q8_0, q8_0) instance(Q4_0, q4_0) instance(Q4_1, q4_1) instance(Q5_0, q5_0) instance(Q5_1, q5_1)       \
      instance(Q2_K, q2_k) instance(Q3_K, q3_k) instance(Q4_K, q4_k) instance(Q5_K, q5_k) instance(Q6_K, q6_k)   \
          instance(IQ4_NL, iq4_nl) instance(IQ4_XS, iq4_xs) instance(GGUF_MXFP4, gguf_mxfp4) instance(22, nvfp4) \
              instance(21, e4m3)
