// GGUF's blocks, eight columns at a time, for the kernels of both GPUs. docs/formats.md says what lies where in each
// type.
//
// Whoever includes this has said what the language calls things: MOEFLUX_INLINE, Bytes (a place in the memory where
// matrices are), half_word_at and word_at (u16 and u32, aligned to their size), two_words_at and four_words_at (such
// with members x, y, z, w, aligned to theirs), f16_of and float_of (their bits), and looked_up: what the four bits in
// each byte of a word stand for, by four words of such numbers.
//
// A number is (code - zero) * scale + least. Codes are bytes without a sign. Every product of a code and its scale is
// exact in f32, so only the sum with `least` is rounded, once, where it is a fused multiply-add.
#pragma once

// In place of the bits of a code.
enum BlockType { q8_0 = 101, q4_0, q4_1, q5_0, q5_1, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, gguf_mxfp4 };

MOEFLUX_INLINE constexpr bool is_in_blocks(unsigned type) { return type > 100; }
MOEFLUX_INLINE constexpr bool is_large(unsigned type) { return (type >= q2_k && type <= q6_k) || type == iq4_xs; }
MOEFLUX_INLINE constexpr unsigned block_columns(unsigned type) { return is_large(type) ? 256 : 32; }
MOEFLUX_INLINE constexpr unsigned block_bytes(unsigned type) {
  return type == q8_0     ? 34
         : type == q4_0   ? 18
         : type == q4_1   ? 20
         : type == q5_0   ? 22
         : type == q5_1   ? 24
         : type == q2_k   ? 84
         : type == q3_k   ? 110
         : type == q4_k   ? 144
         : type == q5_k   ? 176
         : type == q6_k   ? 210
         : type == iq4_nl ? 18
         : type == iq4_xs ? 136
                          : 17;
}
// Of eight codes, too.
MOEFLUX_INLINE constexpr unsigned block_alignment(unsigned type) {
  return block_bytes(type) % 8 == 0 ? 8 : block_bytes(type) % 4 == 0 ? 4 : block_bytes(type) % 2 == 0 ? 2 : 1;
}
// The code that stands for nothing.
MOEFLUX_INLINE constexpr int zero_code(unsigned type) {
  return type == q8_0 || type == iq4_nl || type == iq4_xs ? 128
         : type == q4_0                                   ? 8
         : type == q5_0                                   ? 16
         : type == q3_k                                   ? 4
         : type == q6_k                                   ? 32
         : type == gguf_mxfp4                             ? 12
                                                          : 0;
}

// ---- Eight bytes ----------------------------------------------------------------------------------------------------

// Of the columns in their order, the lowest byte first.
struct EightCodes {
  unsigned low;
  unsigned high;
};

MOEFLUX_INLINE unsigned code_of(EightCodes codes, unsigned i) {
  return (i < 4 ? codes.low : codes.high) >> (i % 4 * 8) & 255u;
}

template <int type>
MOEFLUX_INLINE EightCodes eight_at(Bytes at) {
  EightCodes codes = {0, 0};
  if (block_alignment(type) == 8) {
    const TwoWords both = two_words_at(at);
    codes.low = both.x;
    codes.high = both.y;
  } else if (block_alignment(type) == 4) {
    codes.low = word_at(at);
    codes.high = word_at(at + 4);
  } else if (block_alignment(type) == 2) {
    codes.low = half_word_at(at) | half_word_at(at + 2) << 16;
    codes.high = half_word_at(at + 4) | half_word_at(at + 6) << 16;
  } else {
    for (unsigned i = 0; i < 4; i++) {
      codes.low |= unsigned(at[i]) << (8 * i);
      codes.high |= unsigned(at[4 + i]) << (8 * i);
    }
  }
  return codes;
}

// Of each byte the bits that `mask`, which has four bytes alike, leaves when it is moved to the right.
MOEFLUX_INLINE EightCodes bits_of(EightCodes codes, unsigned first, unsigned mask) {
  codes.low = codes.low >> first & mask;
  codes.high = codes.high >> first & mask;
  return codes;
}

// With more bits above those of the codes.
MOEFLUX_INLINE EightCodes with_more(EightCodes codes, EightCodes more, unsigned bits) {
  codes.low |= more.low << bits;
  codes.high |= more.high << bits;
  return codes;
}

// Eight codes of four bits, each in a byte.
MOEFLUX_INLINE EightCodes nibbles_apart(unsigned codes) {
  const unsigned even = codes & 0x0f0f0f0fu, odd = codes >> 4 & 0x0f0f0f0fu;
  EightCodes apart = {(even & 255u) | (odd & 255u) << 8 | (even >> 8 & 255u) << 16 | (odd >> 8 & 255u) << 24,
                      (even >> 16 & 255u) | (odd >> 16 & 255u) << 8 | (even >> 24) << 16 | (odd >> 24) << 24};
  return apart;
}

// Eight bits, each in a byte.
MOEFLUX_INLINE EightCodes bits_apart(unsigned bits) {
  EightCodes codes = {(bits & 15u) * 0x00204081u & 0x01010101u, (bits >> 4 & 15u) * 0x00204081u & 0x01010101u};
  return codes;
}

// 128 more than the numbers of IQ4, and 12 more than twice those of E2M1.
MOEFLUX_INLINE EightCodes numbers_of_iq4(EightCodes codes) {
  codes.low = looked_up(codes.low, 0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u);
  codes.high = looked_up(codes.high, 0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u);
  return codes;
}
MOEFLUX_INLINE EightCodes numbers_of_e2m1(EightCodes codes) {
  codes.low = looked_up(codes.low, 0x0f0e0d0cu, 0x18141210u, 0x090a0b0cu, 0x00040608u);
  codes.high = looked_up(codes.high, 0x0f0e0d0cu, 0x18141210u, 0x090a0b0cu, 0x00040608u);
  return codes;
}

// ---- Blocks ---------------------------------------------------------------------------------------------------------

// Codes of 4 bits in blocks of 32 columns: the lower halves of 16 bytes, then the upper ones.
template <int type>
MOEFLUX_INLINE EightCodes halves_at(Bytes at, unsigned column) {
  return bits_of(eight_at<type>(at + column % 16), column / 16 * 4, 0x0f0f0f0fu);
}

// Of eight columns of a block, from `column` on.
template <int type>
MOEFLUX_INLINE EightCodes codes_of_block(Bytes block, unsigned column) {
  const unsigned within = column % 32, stretch = column / 32, of_two = column / 128;
  if (type == q8_0) {
    EightCodes codes = eight_at<type>(block + 2 + column);
    codes.low ^= 0x80808080u;
    codes.high ^= 0x80808080u;
    return codes;
  }
  if (type == q4_0) return halves_at<type>(block + 2, column);
  if (type == q4_1) return halves_at<type>(block + 4, column);
  if (type == q5_0) {
    const unsigned fifth = half_word_at(block + 2) | half_word_at(block + 4) << 16;
    return with_more(halves_at<type>(block + 6, column), bits_apart(fifth >> column), 4);
  }
  if (type == q5_1) return with_more(halves_at<type>(block + 8, column), bits_apart(word_at(block + 4) >> column), 4);
  if (type == q2_k) return bits_of(eight_at<type>(block + 16 + 32 * of_two + within), stretch % 4 * 2, 0x03030303u);
  if (type == q3_k)
    return with_more(bits_of(eight_at<type>(block + 32 + 32 * of_two + within), stretch % 4 * 2, 0x03030303u),
                     bits_of(eight_at<type>(block + within), stretch, 0x01010101u), 2);
  if (type == q4_k)
    return bits_of(eight_at<type>(block + 16 + stretch / 2 * 32 + within), stretch % 2 * 4, 0x0f0f0f0fu);
  if (type == q5_k)
    return with_more(bits_of(eight_at<type>(block + 48 + stretch / 2 * 32 + within), stretch % 2 * 4, 0x0f0f0f0fu),
                     bits_of(eight_at<type>(block + 16 + within), stretch, 0x01010101u), 4);
  if (type == q6_k)
    return with_more(bits_of(eight_at<type>(block + 64 * of_two + column % 64), stretch % 4 / 2 * 4, 0x0f0f0f0fu),
                     bits_of(eight_at<type>(block + 128 + 32 * of_two + within), stretch % 4 * 2, 0x03030303u), 4);
  if (type == iq4_nl) return numbers_of_iq4(halves_at<type>(block + 2, column));
  if (type == iq4_xs) return numbers_of_iq4(halves_at<type>(block + 8 + stretch * 16, within));
  return numbers_of_e2m1(halves_at<type>(block + 1, column));
}

struct BlockScale {
  float scale;
  float least;
};

// Of the group of a column.
template <int type>
MOEFLUX_INLINE BlockScale scale_of_block(Bytes block, unsigned column) {
  BlockScale by = {0.0f, 0.0f};
  if (type == gguf_mxfp4) {  // half the power of two with that exponent
    const unsigned exponent = block[0];
    by.scale = float_of(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
  } else if (type == q2_k) {
    const unsigned both = block[column / 16];
    by.scale = f16_of(half_word_at(block + 80)) * float(both & 15u);
    by.least = -(f16_of(half_word_at(block + 82)) * float(both >> 4));
  } else if (type == q3_k) {
    const unsigned i = column / 16, low = block[96 + i % 8] >> (i / 8 * 4) & 15u;
    const unsigned high = block[104 + i % 4] >> (i / 4 * 2) & 3u;
    by.scale = f16_of(half_word_at(block + 108)) * float(int(low | high << 4) - 32);
  } else if (type == q4_k || type == q5_k) {
    const FourWords head = four_words_at(block);
    const unsigned i = column / 32, at = i % 4 * 8;
    const unsigned first = head.y >> at, second = head.z >> at, third = head.w >> at;
    const unsigned scale = i < 4 ? first & 63u : (third & 15u) | (first >> 2 & 48u);
    const unsigned least = i < 4 ? second & 63u : (third >> 4 & 15u) | (second >> 2 & 48u);
    by.scale = f16_of(head.x & 0xffffu) * float(scale);
    by.least = -(f16_of(head.x >> 16) * float(least));
  } else if (type == q6_k) {
    const int scale = int(unsigned(block[192 + column / 16]) ^ 128u) - 128;
    by.scale = f16_of(half_word_at(block + 208)) * float(scale);
  } else if (type == iq4_xs) {
    const unsigned i = column / 32, low = block[4 + i / 2] >> (i % 2 * 4) & 15u;
    const unsigned high = half_word_at(block + 2) >> (2 * i) & 3u;
    by.scale = f16_of(half_word_at(block)) * float(int(low | high << 4) - 32);
  } else {
    by.scale = f16_of(half_word_at(block));
    if (type == q4_1 || type == q5_1) by.least = f16_of(half_word_at(block + 2));
  }
  return by;
}
