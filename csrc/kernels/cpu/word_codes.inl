// Codes as words of 16 bits, and their scales, for instruction sets that multiply those: AVX2 and NEON.
//
// A stretch of 32 columns becomes its 16 even columns and then its 16 odd ones, as whole numbers with their sign: a
// byte is taken from each half of a word.
#include "kernels/cpu/int16_layout.inl"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/matmul_formats.inl"

namespace moeflux::cpu::MOEFLUX_ISA {

constexpr int64_t word_lanes = 2 * lanes;
typedef int16_t Shorts __attribute__((vector_size(4 * lanes)));
typedef uint16_t UnsignedShorts __attribute__((vector_size(4 * lanes)));

constexpr int64_t half_vectors = 16 / word_lanes;  // of the even columns of a stretch, and of the odd ones

// The even columns first.
using StretchWords = Shorts[2 * half_vectors];

// 16 bytes with a sign, or without one.
template <bool has_sign>
MOEFLUX_INLINE void widen_bytes(Sixteen bytes, Shorts* out) {
#if defined(__AVX2__)
  out[0] = (Shorts)(has_sign ? _mm256_cvtepi8_epi16((__m128i)bytes) : _mm256_cvtepu8_epi16((__m128i)bytes));
#else
  typedef int8_t Eight __attribute__((vector_size(8)));
  typedef uint8_t UnsignedEight __attribute__((vector_size(8)));
  const auto half = [&](auto low, auto high, int i) {
    out[i] = has_sign ? __builtin_convertvector((Eight)(i ? high : low), Shorts)
                      : (Shorts) __builtin_convertvector((UnsignedEight)(i ? high : low), UnsignedShorts);
  };
  const UnsignedEight low = __builtin_shufflevector(bytes, bytes, 0, 1, 2, 3, 4, 5, 6, 7);
  const UnsignedEight high = __builtin_shufflevector(bytes, bytes, 8, 9, 10, 11, 12, 13, 14, 15);
  half(low, high, 0);
  half(low, high, 1);
#endif
}

// So many codes that are bytes with a sign or without one, as two vectors of words.
template <bool has_sign>
MOEFLUX_INLINE void split_bytes(Shorts both, Shorts& even, Shorts& odd) {
  if constexpr (has_sign) {
    even = (Shorts)((UnsignedShorts)both << 8) >> 8;
    odd = both >> 8;
  } else {
    even = both & 0xff;
    odd = (Shorts)((UnsignedShorts)both >> 8);
  }
}

// 32 codes. `halves`: they were stored as two times 16 just before, and are loaded so.
template <bool has_sign, bool halves = false>
MOEFLUX_INLINE void words_of_bytes(const void* from, StretchWords& to) {
  const uint8_t* bytes = static_cast<const uint8_t*>(from);
#if defined(__AVX2__)
  if constexpr (halves) {
    const __m256i first = _mm256_castsi128_si256(load<__m128i>(bytes));
    const Shorts both = (Shorts)_mm256_inserti128_si256(first, load<__m128i>(bytes + 16), 1);
    return split_bytes<has_sign>(both, to[0], to[1]);
  }
#endif
  MOEFLUX_UNROLL
  for (int64_t v = 0; v < half_vectors; ++v)
    split_bytes<has_sign>(load<Shorts>(bytes + v * 4 * lanes), to[v], to[half_vectors + v]);
}

// Codes of 4 bits, two neighbouring columns in a byte.
MOEFLUX_INLINE void words_of_halves(const uint8_t* from, StretchWords& to) {
  Shorts both[half_vectors];
  widen_bytes<false>(load<Sixteen>(from), both);
  MOEFLUX_UNROLL
  for (int64_t v = 0; v < half_vectors; ++v) {
    to[v] = both[v] & 15;
    to[half_vectors + v] = (Shorts)((UnsignedShorts)both[v] >> 4);
  }
}

// The same where they are E2M1: twice what they stand for.
MOEFLUX_INLINE void words_of_e2m1(const uint8_t* from, StretchWords& to) {
  const Sixteen both = load<Sixteen>(from);
  widen_bytes<true>(looked_up(both & 15, twice_e2m1), to);
  widen_bytes<true>(looked_up(bits_from(both, 4, 15), twice_e2m1), to + half_vectors);
}

// Stretch `s` of a block of Q4_K: half of the bits of 32 bytes.
MOEFLUX_INLINE void words_of_q4_k(const uint8_t* block, int64_t s, StretchWords& to) {
  MOEFLUX_UNROLL
  for (int64_t v = 0; v < half_vectors; ++v) {
    const UnsignedShorts both = load<UnsignedShorts>(block + 16 + s / 2 * 32 + v * 4 * lanes);
    const int first = static_cast<int>(s % 2 * 4);
    to[v] = (Shorts)(both >> first) & 15;
    to[half_vectors + v] = (Shorts)(both >> (8 + first)) & 15;
  }
}

// Stretch `s` of the 128 columns at `from`; in a block of 256 columns, these are its second half if `half` is 1.
template <int bits>
MOEFLUX_INLINE void words_at(const uint8_t* from, int64_t half, int64_t s, StretchWords& to) {
  if constexpr (are_in_blocks(bits)) {
    constexpr BlockShape shape = block_shape(block_type_of(bits));
    const uint8_t* block = shape.columns == 256 ? from - half * (shape.bytes / 2) : from + s * shape.bytes;
    const int64_t at = shape.columns == 256 ? half * 4 + s : 0;
    if constexpr (shape.type == BlockType::q8_0) return words_of_bytes<true>(block + 2, to);
    if constexpr (shape.type == BlockType::q4_k) return words_of_q4_k(block, at, to);
    int8_t codes[stretch];
    Block<shape.type>::codes(block, at, codes);
    words_of_bytes<true, shape.columns == 32 || shape.type == BlockType::iq4_xs>(codes, to);
  } else if constexpr (bits == 4) {
    words_of_halves(from + s * 16, to);
  } else if constexpr (bits == e2m1) {
    words_of_e2m1(from + s * 16, to);
  } else if constexpr (bits == 8) {
    words_of_bytes<false>(from + s * stretch, to);
  } else {
    uint8_t codes[stretch];
    codes_to_bytes<bits>(from + s * stretch * bits / 8, codes);
    words_of_bytes<false>(codes, to);
  }
}

// ---- Scales --------------------------------------------------------------------------------------------------------

constexpr int64_t scale_groups = 8;  // groups whose scales are transposed at once

// Scales of groups in so many rows of the matrix: a lane is a row.
struct RowScales {
  Floats scales[scale_groups];
  Floats biases[scale_groups];
};

// Numbers of one row become those of a lane.
MOEFLUX_INLINE void turn_rows(const float (&from)[lanes][scale_groups], Floats (&to)[scale_groups]) {
#if defined(__AVX2__)
  typedef double Doubles __attribute__((vector_size(32)));
  Floats pairs[8];
  MOEFLUX_UNROLL
  for (int i = 0; i < 8; i += 2) {
    const Floats a = load<Floats>(from[i]);
    const Floats b = load<Floats>(from[i + 1]);
    pairs[i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
    pairs[i + 1] = __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  }
  Doubles four[8];
  MOEFLUX_UNROLL
  for (int i = 0; i < 8; i += 4) {
    MOEFLUX_UNROLL
    for (int j = 0; j < 2; ++j) {
      const Doubles a = (Doubles)pairs[i + j];
      const Doubles b = (Doubles)pairs[i + j + 2];
      four[i + 2 * j] = __builtin_shufflevector(a, b, 0, 4, 2, 6);
      four[i + 2 * j + 1] = __builtin_shufflevector(a, b, 1, 5, 3, 7);
    }
  }
  MOEFLUX_UNROLL
  for (int i = 0; i < 4; ++i) {
    to[i] = (Floats)__builtin_shufflevector(four[i], four[i + 4], 0, 1, 4, 5);
    to[i + 4] = (Floats)__builtin_shufflevector(four[i], four[i + 4], 2, 3, 6, 7);
  }
#else
  for (int64_t g = 0; g < scale_groups; ++g)
    for (int64_t r = 0; r < lanes; ++r) to[g][r] = from[r][g];
#endif
}

// Numbers below 2^16.
MOEFLUX_INLINE Halves narrow_words(Words value) {
#if defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)value, (__m256i)value);
  return (Halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
  return narrow(value);
#endif
}

// 256ths of `count` numbers E4M3.
MOEFLUX_INLINE void e4m3_256ths_of(const uint8_t* from, int64_t count, float (&out)[scale_groups]) {
  uint8_t rest[scale_groups] = {};
  if (count < scale_groups) {
    __builtin_memcpy(rest, from, static_cast<size_t>(count));
    from = rest;
  }
#if defined(__AVX2__)
  const __m128i moved = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadu_si64(from)), 7);
  store(out, _mm256_cvtph_ps(_mm_and_si128(moved, _mm_set1_epi16(static_cast<int16_t>(~0x4000)))));
#else
  for (int64_t g = 0; g < scale_groups; g += lanes) store(out + g, from_e4m3((Words)load_bytes(from + g)) * 0x1p-8f);
#endif
}

// Numbers of `count` blocks of so many bytes. They are put together in registers of the processor's whole numbers: a
// vector would wait for stores of its parts.
typedef float EightFloats __attribute__((vector_size(4 * scale_groups)));

template <typename Number>
MOEFLUX_INLINE uint64_t numbers_apart(const uint8_t* from, int64_t bytes, int64_t first, int64_t count) {
  constexpr int64_t in_one = 8 / static_cast<int64_t>(sizeof(Number));
  uint64_t all = 0;
  MOEFLUX_UNROLL
  for (int64_t i = in_one - 1; i >= 0; --i)
    all = all << (8 * sizeof(Number)) | (first + i < count ? load<Number>(from + (first + i) * bytes) : 0u);
  return all;
}

MOEFLUX_INLINE EightFloats f16_apart(const uint8_t* from, int64_t bytes, int64_t count) {
  EightFloats to;
  typedef uint64_t Two __attribute__((vector_size(16)));
  const Two all = {numbers_apart<uint16_t>(from, bytes, 0, count), numbers_apart<uint16_t>(from, bytes, 4, count)};
  Floats parts[scale_groups / lanes];
  Halves halves[scale_groups / lanes];
  __builtin_memcpy(halves, &all, sizeof all);
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < scale_groups / lanes; ++i) parts[i] = from_f16(halves[i]);
  __builtin_memcpy(&to, parts, sizeof to);
  return to;
}

MOEFLUX_INLINE EightFloats half_powers_apart(const uint8_t* from, int64_t bytes, int64_t count) {
  EightFloats to;
  const uint64_t all = numbers_apart<uint8_t>(from, bytes, 0, count);
  Floats parts[scale_groups / lanes];
#if defined(__AVX2__)
  parts[0] = half_powers((Words)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(all))));
#else
  uint8_t each[scale_groups];
  __builtin_memcpy(each, &all, sizeof all);
  for (int64_t i = 0; i < scale_groups / lanes; ++i) parts[i] = half_powers((Words)load_bytes(each + i * lanes));
#endif
  __builtin_memcpy(&to, parts, sizeof to);
  return to;
}

// Scales of `count` groups of a row from `first` on, a multiple of 8, and their biases, if they have any. Those of
// NVFP4 are 256ths.
template <int bits, int64_t group_size>
MOEFLUX_INLINE void scales_of_row(const Weights& w, int64_t row, int64_t first, int64_t count,
                                  float (&scales)[scale_groups], float (&biases)[scale_groups]) {
  if constexpr (are_in_blocks(bits)) {
    constexpr BlockShape shape = block_shape(block_type_of(bits));
    const uint8_t* block = w.codes + row * w.code_stride + first * group_size / shape.columns * shape.bytes;
    if constexpr (shape.columns == 256) {
      BlockScales all;
      Block<shape.type>::scales(block, all);
      const int64_t at = first % (256 / group_size);
      __builtin_memcpy(scales, all.scale + at, sizeof scales);
      if constexpr (Block<shape.type>::has_bias) __builtin_memcpy(biases, all.bias + at, sizeof biases);
    } else {
      constexpr bool powers = shape.type == BlockType::mxfp4;
      const auto numbers = [&](int64_t offset) __attribute__((always_inline)) {
        return powers ? half_powers_apart(block, shape.bytes, count) : f16_apart(block + offset, shape.bytes, count);
      };
      store(scales, numbers(0));
      if constexpr (Block<shape.type>::has_bias) store(biases, numbers(2));
    }
  } else {
    const int64_t at = row * w.scale_stride + w.row_scale_bytes + first * scale_bytes_of(w.scale_type);
    if constexpr (bits == e2m1 && group_size == 16) return e4m3_256ths_of(w.scales + at, count, scales);
    widen_all(w.scale_type, w.scales + at, count, scales);
    if constexpr (bits != e2m1) widen_all(w.scale_type, w.biases + at, count, biases);
  }
}

template <int bits>
constexpr bool has_bias = bits != e2m1;
template <int bits>
  requires(are_in_blocks(bits))
constexpr bool has_bias<bits> = Block<block_type_of(bits)>::has_bias;

// Q4_K and Q5_K, whose blocks begin with 16 bytes of scales and minima: see scales_of_6_bits. They are taken apart when
// lanes are rows already.
template <int bits>
constexpr bool has_six_bits = bits == codes_in(BlockType::q4_k) || bits == codes_in(BlockType::q5_k);

MOEFLUX_INLINE void load_six_bits(const uint8_t* const (&blocks)[lanes], RowScales& to) {
  Words words[4];
#if defined(__AVX2__)
  __m256i v[4];  // rows i and i + 4
  MOEFLUX_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m256i low = _mm256_castsi128_si256(load<__m128i>(blocks[i]));
    v[i] = _mm256_inserti128_si256(low, load<__m128i>(blocks[i + 4]), 1);
  }
  const __m256i low[2] = {_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpacklo_epi32(v[2], v[3])};
  const __m256i high[2] = {_mm256_unpackhi_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[2], v[3])};
  words[0] = (Words)_mm256_unpacklo_epi64(low[0], low[1]);
  words[1] = (Words)_mm256_unpackhi_epi64(low[0], low[1]);
  words[2] = (Words)_mm256_unpacklo_epi64(high[0], high[1]);
  words[3] = (Words)_mm256_unpackhi_epi64(high[0], high[1]);
#else
  for (int64_t r = 0; r < lanes; ++r) {
    const Words of_row = load<Words>(blocks[r]);
    for (int i = 0; i < 4; ++i) words[i][r] = of_row[i];
  }
#endif
  const Floats scale = from_f16(narrow_words(words[0] & 0xffffu));
  const Floats minimum = -from_f16(narrow_words(words[0] >> 16));
  const Words scales[2] = {words[1] & 0x3f3f3f3fu, (words[3] & 0x0f0f0f0fu) | ((words[1] >> 2) & 0x30303030u)};
  const Words minima[2] = {words[2] & 0x3f3f3f3fu, ((words[3] >> 4) & 0x0f0f0f0fu) | ((words[2] >> 2) & 0x30303030u)};
  MOEFLUX_UNROLL
  for (int g = 0; g < scale_groups; ++g) {
    const auto number = [&](const Words(&from)[2]) __attribute__((always_inline)) {
      return __builtin_convertvector((Ints)((from[g / 4] >> (g % 4 * 8)) & 0xffu), Floats);
    };
    to.scales[g] = number(scales) * scale;
    to.biases[g] = number(minima) * minimum;
  }
}

template <int bits, int64_t group_size>
MOEFLUX_INLINE void load_scales(const Weights& w, const int64_t (&rows)[lanes], int64_t first, int64_t count,
                                RowScales& to) {
  if constexpr (has_six_bits<bits>) {
    const uint8_t* blocks[lanes];
    for (int64_t r = 0; r < lanes; ++r)
      blocks[r] = w.codes + rows[r] * w.code_stride + first / scale_groups * block_shape(block_type_of(bits)).bytes;
    return load_six_bits(blocks, to);
  }
  alignas(32) float scales[lanes][scale_groups];
  alignas(32) float biases[lanes][scale_groups];
  if (count < scale_groups) {  // no number is to meet the zeros of a row's last block
    __builtin_memset(scales, 0, sizeof scales);
    __builtin_memset(biases, 0, sizeof biases);
  }
  for (int64_t r = 0; r < lanes; ++r) scales_of_row<bits, group_size>(w, rows[r], first, count, scales[r], biases[r]);
  turn_rows(scales, to.scales);
  if constexpr (has_bias<bits>) turn_rows(biases, to.biases);
}

}  // namespace moeflux::cpu::MOEFLUX_ISA
