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
typedef uint8_t Bytes __attribute__((vector_size(byte_lanes)));
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
  return from_f16(Halves{} + load<uint16_t>(from))[0];
}

// factor * number for 16 whole numbers.
MOEFLUX_INLINE void times(float factor, const int8_t (&numbers)[16], float (&out)[16]) {
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < 16; i += lanes)
    store(out + i, __builtin_convertvector(load_codes(numbers + i), Floats) * splat(factor));
}

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
    int8_t numbers[16];
    store(numbers, both & 15);
    times(f16_at(block + 80), numbers, to.scale);
    store(numbers, bits_from(both, 4, 15));
    times(-f16_at(block + 82), numbers, to.bias);
  }
  MOEFLUX_INLINE void codes(const uint8_t* block, int64_t s, int8_t* out) {
    each_part(out, [&](int64_t i) { return bits_from(load<Bytes>(block + 16 + s / 4 * 32 + i), s % 4 * 2, 3); });
  }
};

template <>
struct Block<BlockType::q3_k> {
  static constexpr bool has_bias = false;
  MOEFLUX_INLINE void scales(const uint8_t* block, BlockScales& to) {
    const uint32_t low[2] = {word_at(block + 96), word_at(block + 100)};
    const uint32_t high = word_at(block + 104);
    int8_t numbers[16];
    MOEFLUX_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t four = (low[i % 2] >> (i / 2 * 4)) & 0x0f0f0f0fu;
      store(numbers + 4 * i, four | ((high >> (2 * i)) & 0x03030303u) << 4);
    }
    store(numbers, load<Sixteen>(numbers) - 32);
    times(f16_at(block + 108), numbers, to.scale);
  }
  MOEFLUX_INLINE void codes(const uint8_t* block, int64_t s, int8_t* out) {
    each_part(out, [&](int64_t i) {
      const Bytes low = bits_from(load<Bytes>(block + 32 + s / 4 * 32 + i), s % 4 * 2, 3);
      return (low | raised_by(bits_from(load<Bytes>(block + i), s, 1), 2)) - 4;
    });
  }
};

// Scales and minima of 6 bits, eight of each in 12 bytes, as Q4_K and Q5_K have them behind their two f16.
MOEFLUX_INLINE void scales_of_6_bits(const uint8_t* block, BlockScales& to) {
  const uint32_t first = word_at(block + 4);
  const uint32_t second = word_at(block + 8);
  const uint32_t third = word_at(block + 12);
  int8_t numbers[16] = {};
  store(numbers, first & 0x3f3f3f3fu);
  store(numbers + 4, (third & 0x0f0f0f0fu) | ((first >> 2) & 0x30303030u));
  times(f16_at(block), numbers, to.scale);
  store(numbers, second & 0x3f3f3f3fu);
  store(numbers + 4, ((third >> 4) & 0x0f0f0f0fu) | ((second >> 2) & 0x30303030u));
  times(-f16_at(block + 2), numbers, to.bias);
}

template <>
struct Block<BlockType::q4_k> {
  static constexpr bool has_bias = true;
  MOEFLUX_INLINE void scales(const uint8_t* block, BlockScales& to) { scales_of_6_bits(block, to); }
  MOEFLUX_INLINE void codes(const uint8_t* block, int64_t s, int8_t* out) {
    each_part(out, [&](int64_t i) { return bits_from(load<Bytes>(block + 16 + s / 2 * 32 + i), s % 2 * 4, 15); });
  }
};

template <>
struct Block<BlockType::q5_k> {
  static constexpr bool has_bias = true;
  MOEFLUX_INLINE void scales(const uint8_t* block, BlockScales& to) { scales_of_6_bits(block, to); }
  MOEFLUX_INLINE void codes(const uint8_t* block, int64_t s, int8_t* out) {
    each_part(out, [&](int64_t i) {
      const Bytes low = bits_from(load<Bytes>(block + 48 + s / 2 * 32 + i), s % 2 * 4, 15);
      return low | raised_by(bits_from(load<Bytes>(block + 16 + i), s, 1), 4);
    });
  }
};

template <>
struct Block<BlockType::q6_k> {
  static constexpr bool has_bias = false;
  MOEFLUX_INLINE void scales(const uint8_t* block, BlockScales& to) {
    int8_t numbers[16];
    __builtin_memcpy(numbers, block + 192, sizeof numbers);
    times(f16_at(block + 208), numbers, to.scale);
  }
  MOEFLUX_INLINE void codes(const uint8_t* block, int64_t s, int8_t* out) {
    each_part(out, [&](int64_t i) {
      const Bytes low = bits_from(load<Bytes>(block + s / 4 * 64 + s % 2 * 32 + i), s % 4 / 2 * 4, 15);
      return (low | raised_by(bits_from(load<Bytes>(block + 128 + s / 4 * 32 + i), s % 4 * 2, 3), 4)) - 32;
    });
  }
};

template <>
struct Block<BlockType::iq4_xs> {
  static constexpr bool has_bias = false;
  MOEFLUX_INLINE void scales(const uint8_t* block, BlockScales& to) {
    const uint32_t high = load<uint16_t>(block + 2);
    int8_t numbers[16] = {};
    for (int s = 0; s < 8; ++s) {
      const uint32_t low = static_cast<uint32_t>(block[4 + s / 2]) >> (s % 2 * 4);
      numbers[s] = static_cast<int8_t>((low & 15) | ((high >> (2 * s)) & 3) << 4) - 32;
    }
    times(f16_at(block), numbers, to.scale);
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
