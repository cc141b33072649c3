// The numbers of GGUF's blocks as f32, 32 columns at a time. docs/formats.md says what lies where in each type.
//
// A number is code * scale, or code * scale + bias where a type has minima. A scale is a block's f16, or that times a
// whole number. It has at most 19 bits, and its product with a code at most 24, so both are exact in f32. Only the sum
// with a bias is rounded, once, with and without an instruction that multiplies and adds at once. So all instruction
// sets give the same numbers.
#include "core/block_types.h"
#include "kernels/cpu/codes.h"

namespace moeflux::cpu::MOEFLUX_ISA {

constexpr int64_t byte_lanes = lanes >= 8 ? 32 : 16;
// Stands before the loop over the stretches of a block. Then shifts are by constants. Narrow vectors would be too many
// instructions.
#if defined(__AVX2__)
#define MOEFLUX_UNROLL_BLOCK MOEFLUX_UNROLL
#else
#define MOEFLUX_UNROLL_BLOCK
#endif

typedef uint8_t ManyBytes __attribute__((vector_size(byte_lanes)));
typedef uint8_t Sixteen __attribute__((vector_size(16)));

// Each byte moved to the right, and what is left of it there.
template <typename Vector>
MOEFLUX_INLINE Vector bits_from(Vector bytes, int64_t first, uint8_t mask) {
  typedef uint16_t Pairs __attribute__((vector_size(sizeof(Vector))));
  return (Vector)((Pairs)bytes >> static_cast<int>(first)) & mask;
}

// Each byte moved to the left. Nothing may be pushed out of it.
template <typename Vector>
MOEFLUX_INLINE Vector raised_by(Vector bytes, int64_t bits) {
  typedef uint16_t Pairs __attribute__((vector_size(sizeof(Vector))));
  return (Vector)((Pairs)bytes << static_cast<int>(bits));
}

// The scales of a block, and its biases where it has minima: of each group.
struct BlockScales {
  float scale[16];
  float bias[16];
};

MOEFLUX_INLINE float f16_at(const uint8_t* from) {
#if defined(__AVX2__)
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(load<uint16_t>(from))));
#else
  return from_f16(Halves{} + load<uint16_t>(from))[0];
#endif
}

// factor * number for 16 whole numbers, one a byte.
MOEFLUX_INLINE void times(float factor, Sixteen numbers, float (&out)[16]) {
#if defined(__AVX512F__)
  store(out, (Floats)_mm512_maskz_cvtepi32_ps(all_lanes, _mm512_maskz_cvtepi8_epi32(all_lanes, (__m128i)numbers)) *
                 splat(factor));
#elif defined(__AVX2__)
  const __m128i upper = _mm_unpackhi_epi64((__m128i)numbers, (__m128i)numbers);
  store(out, (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32((__m128i)numbers)) * splat(factor));
  store(out + 8, (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(upper)) * splat(factor));
#else
  int8_t each[16];
  store(each, numbers);
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < 16; i += lanes)
    store(out + i, __builtin_convertvector(load_codes(each + i), Floats) * splat(factor));
#endif
}

typedef uint32_t FourWords __attribute__((vector_size(16)));

MOEFLUX_INLINE uint32_t word_at(const uint8_t* from) { return load<uint32_t>(from); }

// Codes of 4 bits, the lower half of each of 16 bytes before all the upper ones.
template <typename Use>
MOEFLUX_INLINE void halves_of_bytes(const uint8_t* from, int8_t* out, const Use& use) {
  const Sixteen both = load<Sixteen>(from);
  store(out, use(both & 15, 0));
  store(out + 16, use(bits_from(both, 4, 15), 16));
}

// What 16 codes of 4 bits stand for.
MOEFLUX_INLINE Sixteen looked_up(Sixteen codes, const int8_t (&numbers)[16]) {
#if defined(__AVX2__)
  return (Sixteen)_mm_shuffle_epi8(load<__m128i>(numbers), (__m128i)codes);
#elif defined(__ARM_NEON)
  return (Sixteen)vqtbl1q_u8(load<uint8x16_t>(numbers), (uint8x16_t)codes);
#else
  Sixteen found;
  for (int i = 0; i < 16; ++i) found[i] = static_cast<uint8_t>(numbers[codes[i]]);
  return found;
#endif
}

// The fifth bits of 16 codes, at their place in a byte.
MOEFLUX_INLINE Sixteen fifth_bits(uint32_t bits) {
  const Sixteen which = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
  const Sixteen bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const Sixteen low = Sixteen{} + static_cast<uint8_t>(bits);
  const Sixteen high = Sixteen{} + static_cast<uint8_t>(bits >> 8);
  return (Sixteen)(((which != 0 ? high : low) & bit) != 0) & 16;
}

constexpr int8_t iq4_numbers[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t twice_e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Of each type: whether numbers have biases, the scales of a block, and the codes of stretch `s` of it, less what makes
// them signed.
template <BlockType type>
struct Block;

// ---- Blocks of 32 columns ------------------------------------------------------------------------------------------

template <>
struct Block<BlockType::q8_0> {
  static constexpr bool has_bias = false;
  MOEFLUX_INLINE void scales(const uint8_t* block, BlockScales& to) { to.scale[0] = f16_at(block); }
  MOEFLUX_INLINE void codes(const uint8_t* block, int64_t, int8_t* out) { __builtin_memcpy(out, block + 2, 32); }
};

template <>
struct Block<BlockType::q4_0> {
  static constexpr bool has_bias = false;
  MOEFLUX_INLINE void scales(const uint8_t* block, BlockScales& to) { to.scale[0] = f16_at(block); }
  MOEFLUX_INLINE void codes(const uint8_t* block, int64_t, int8_t* out) {
    halves_of_bytes(block + 2, out, [](Sixteen codes, int) { return codes - 8; });
  }
};

template <>
struct Block<BlockType::q4_1> {
  static constexpr bool has_bias = true;
  MOEFLUX_INLINE void scales(const uint8_t* block, BlockScales& to) {
    to.scale[0] = f16_at(block);
    to.bias[0] = f16_at(block + 2);
  }
  MOEFLUX_INLINE void codes(const uint8_t* block, int64_t, int8_t* out) {
    halves_of_bytes(block + 4, out, [](Sixteen codes, int) { return codes; });
  }
};

template <>
struct Block<BlockType::q5_0> {
  static constexpr bool has_bias = false;
  MOEFLUX_INLINE void scales(const uint8_t* block, BlockScales& to) { to.scale[0] = f16_at(block); }
  MOEFLUX_INLINE void codes(const uint8_t* block, int64_t, int8_t* out) {
    const uint32_t high = word_at(block + 2);
    halves_of_bytes(block + 6, out, [&](Sixteen codes, int first) { return (codes | fifth_bits(high >> first)) - 16; });
  }
};

template <>
struct Block<BlockType::q5_1> {
  static constexpr bool has_bias = true;
  MOEFLUX_INLINE void scales(const uint8_t* block, BlockScales& to) {
    to.scale[0] = f16_at(block);
    to.bias[0] = f16_at(block + 2);
  }
  MOEFLUX_INLINE void codes(const uint8_t* block, int64_t, int8_t* out) {
    const uint32_t high = word_at(block + 4);
    halves_of_bytes(block + 8, out, [&](Sixteen codes, int first) { return codes | fifth_bits(high >> first); });
  }
};

template <>
struct Block<BlockType::iq4_nl> {
  static constexpr bool has_bias = false;
  MOEFLUX_INLINE void scales(const uint8_t* block, BlockScales& to) { to.scale[0] = f16_at(block); }
  MOEFLUX_INLINE void codes(const uint8_t* block, int64_t, int8_t* out) {
    halves_of_bytes(block + 2, out, [](Sixteen codes, int) { return looked_up(codes, iq4_numbers); });
  }
};

// Half the power of two with that exponent, 255 too. The least two are subnormal.
MOEFLUX_INLINE float half_power(uint32_t exponent) {
  const uint32_t bits = exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23;
  return load<float>(&bits);
}

template <>
struct Block<BlockType::mxfp4> {
  static constexpr bool has_bias = false;
  MOEFLUX_INLINE void scales(const uint8_t* block, BlockScales& to) { to.scale[0] = half_power(*block); }
  MOEFLUX_INLINE void codes(const uint8_t* block, int64_t, int8_t* out) {
    halves_of_bytes(block + 1, out, [](Sixteen codes, int) { return looked_up(codes, twice_e2m1); });
  }
};

// ---- Blocks of 256 columns -----------------------------------------------------------------------------------------

// Applies to byte lanes 0 ... 31 of a stretch, some at a time.
template <typename Make>
MOEFLUX_INLINE void each_part(int8_t* out, const Make& make) {
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < stretch; i += byte_lanes) store(out + i, make(i));
}

template <>
struct Block<BlockType::q2_k> {
  static constexpr bool has_bias = true;
  MOEFLUX_INLINE void scales(const uint8_t* block, BlockScales& to) {
    const Sixteen both = load<Sixteen>(block);
    times(f16_at(block + 80), both & 15, to.scale);
    times(-f16_at(block + 82), bits_from(both, 4, 15), to.bias);
  }
  MOEFLUX_INLINE void codes(const uint8_t* block, int64_t s, int8_t* out) {
    each_part(out, [&](int64_t i) { return bits_from(load<ManyBytes>(block + 16 + s / 4 * 32 + i), s % 4 * 2, 3); });
  }
};

// 16 scales of 6 bits in 12 bytes: the lower 4 bits of all before the upper 2.
MOEFLUX_INLINE Sixteen scales_of_q3_k(const uint8_t* block) {
  const uint32_t first = word_at(block + 96);
  const uint32_t second = word_at(block + 100);
  const uint32_t high = word_at(block + 104);
  const FourWords low = {first, second, first >> 4, second >> 4};
  const FourWords upper = {high << 4, high << 2, high, high >> 2};
  return (Sixteen)((low & 0x0f0f0f0fu) | (upper & 0x30303030u)) - 32;
}

template <>
struct Block<BlockType::q3_k> {
  static constexpr bool has_bias = false;
  MOEFLUX_INLINE void scales(const uint8_t* block, BlockScales& to) {
    times(f16_at(block + 108), scales_of_q3_k(block), to.scale);
  }
  MOEFLUX_INLINE void codes(const uint8_t* block, int64_t s, int8_t* out) {
    each_part(out, [&](int64_t i) {
      const ManyBytes low = bits_from(load<ManyBytes>(block + 32 + s / 4 * 32 + i), s % 4 * 2, 3);
      return (low | raised_by(bits_from(load<ManyBytes>(block + i), s, 1), 2)) - 4;
    });
  }
};

// Eight scales of 6 bits, then eight minima, which Q4_K and Q5_K have in 12 bytes behind their two f16. The lower half
// of each eight is as it is. Of the upper half, the third word has 4 bits, and the first two have 2 above the lower
// half.
MOEFLUX_INLINE Sixteen scales_of_6_bits(const uint8_t* block) {
  const FourWords words = load<FourWords>(block);
  const FourWords low = __builtin_shufflevector(words, words, 1, 3, 2, 3) >> FourWords{0, 0, 0, 4};
  const FourWords high = __builtin_shufflevector(words, words, 1, 1, 2, 2) >> 2;
  return (Sixteen)((low & FourWords{0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f}) |
                   (high & FourWords{0, 0x30303030, 0, 0x30303030}));
}

// Only the first eight of each are there.
MOEFLUX_INLINE void scales_and_minima(const uint8_t* block, BlockScales& to) {
  const Sixteen numbers = scales_of_6_bits(block);
  times(f16_at(block), numbers, to.scale);
  times(-f16_at(block + 2),
        __builtin_shufflevector(numbers, numbers, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15), to.bias);
}

template <>
struct Block<BlockType::q4_k> {
  static constexpr bool has_bias = true;
  MOEFLUX_INLINE void scales(const uint8_t* block, BlockScales& to) { scales_and_minima(block, to); }
  MOEFLUX_INLINE void codes(const uint8_t* block, int64_t s, int8_t* out) {
    each_part(out, [&](int64_t i) { return bits_from(load<ManyBytes>(block + 16 + s / 2 * 32 + i), s % 2 * 4, 15); });
  }
};

template <>
struct Block<BlockType::q5_k> {
  static constexpr bool has_bias = true;
  MOEFLUX_INLINE void scales(const uint8_t* block, BlockScales& to) { scales_and_minima(block, to); }
  MOEFLUX_INLINE void codes(const uint8_t* block, int64_t s, int8_t* out) {
    each_part(out, [&](int64_t i) {
      const ManyBytes low = bits_from(load<ManyBytes>(block + 48 + s / 2 * 32 + i), s % 2 * 4, 15);
      return low | raised_by(bits_from(load<ManyBytes>(block + 16 + i), s, 1), 4);
    });
  }
};

template <>
struct Block<BlockType::q6_k> {
  static constexpr bool has_bias = false;
  MOEFLUX_INLINE void scales(const uint8_t* block, BlockScales& to) {
    times(f16_at(block + 208), load<Sixteen>(block + 192), to.scale);
  }
  MOEFLUX_INLINE void codes(const uint8_t* block, int64_t s, int8_t* out) {
    each_part(out, [&](int64_t i) {
      const ManyBytes low = bits_from(load<ManyBytes>(block + s / 4 * 64 + s % 2 * 32 + i), s % 4 / 2 * 4, 15);
      return (low | raised_by(bits_from(load<ManyBytes>(block + 128 + s / 4 * 32 + i), s % 4 * 2, 3), 4)) - 32;
    });
  }
};

// Eight scales of 6 bits, twice: their lower 4 bits lie in 4 bytes, the upper 2 in the 2 bytes before.
MOEFLUX_INLINE Sixteen scales_of_iq4_xs(const uint8_t* block) {
  const uint32_t low = word_at(block + 4);
  const uint32_t high = load<uint16_t>(block + 2);
  // Byte i of the two words has scale 2i in its lower half, and scale 2i + 1.
  const uint32_t even = low & 0x0f0f0f0fu;
  const uint32_t odd = (low >> 4) & 0x0f0f0f0fu;
  const auto upper = [&](int first) {  // of scales first, first + 2, first + 4 and first + 6
    const uint32_t bits = high >> (2 * first);
    return (bits & 3) << 4 | (bits & 0x30) << 8 | (bits & 0x300) << 12 | (bits & 0x3000) << 16;
  };
  const FourWords both = {even | upper(0), odd | upper(1), 0, 0};
  const Sixteen bytes = (Sixteen)both;
  return __builtin_shufflevector(bytes, bytes, 0, 4, 1, 5, 2, 6, 3, 7, 0, 4, 1, 5, 2, 6, 3, 7) - 32;
}

template <>
struct Block<BlockType::iq4_xs> {
  static constexpr bool has_bias = false;
  MOEFLUX_INLINE void scales(const uint8_t* block, BlockScales& to) {
    times(f16_at(block), scales_of_iq4_xs(block), to.scale);
  }
  MOEFLUX_INLINE void codes(const uint8_t* block, int64_t s, int8_t* out) {
    halves_of_bytes(block + 8 + s * 16, out, [](Sixteen codes, int) { return looked_up(codes, iq4_numbers); });
  }
};

// ---- As a format of matmul.inl -------------------------------------------------------------------------------------

template <BlockType type>
struct Blocks {
  static constexpr bool affine = false;
  static constexpr BlockShape shape = block_shape(type);
  static constexpr int64_t stretches = shape.columns / stretch;
  static constexpr int64_t stretch_bytes = stretch;  // of a tail, which no row of blocks has

  // Stretch `s` of a block.
  MOEFLUX_INLINE void unpack(const BlockScales& scales, const uint8_t* block, int64_t s,
                             Floats (&out)[stretch / lanes]) {
    int8_t codes[stretch];
    Block<type>::codes(block, s, codes);
    MOEFLUX_UNROLL
    for (int64_t v = 0; v < stretch / lanes; ++v) {
      const int64_t group = (s * stretch + v * lanes) / shape.group;
      const Floats code = __builtin_convertvector(load_codes(codes + v * lanes), Floats);
      if constexpr (Block<type>::has_bias)
        out[v] = fma(code, splat(scales.scale[group]), splat(scales.bias[group]));
      else
        out[v] = code * splat(scales.scale[group]);
    }
  }
};

template <typename Format>
constexpr bool in_blocks = false;
template <BlockType type>
constexpr bool in_blocks<Blocks<type>> = true;

}  // namespace moeflux::cpu::MOEFLUX_ISA
