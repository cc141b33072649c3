// The formats of matrices as matmul.inl takes them: scales as f32, and 32 columns of a row as f32. Those in blocks are
// in block_numbers.inl.
#include "kernels/cpu/block_numbers.inl"
#include "kernels/cpu/codes.h"

namespace moeflux::cpu::MOEFLUX_ISA {

constexpr int64_t stretch_vectors = stretch / lanes;

// ---- Scales --------------------------------------------------------------------------------------------------------

MOEFLUX_INLINE Floats widen(DType type, const uint8_t* from) {
  if (type == DType::u8) return half_powers((Words)load_bytes(from));
  if (type == DType::f8_e4m3) return from_e4m3((Words)load_bytes(from)) * 0.5f;
  if (type == DType::f32) return load<Floats>(from);
  return type == DType::bf16 ? load_bf16(from) : from_f16(load<Halves>(from));
}

// `count` numbers as f32; scales of codes of four bits are halved.
MOEFLUX_INLINE void widen_all(DType type, const uint8_t* from, int64_t count, float* to) {
  const int64_t bytes = scale_bytes_of(type);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) store(to + i, widen(type, from + i * bytes));
  if (i == count) return;
  uint8_t rest[lanes * 4] = {};
  __builtin_memcpy(rest, from + i * bytes, static_cast<size_t>((count - i) * bytes));
  store_some(to + i, widen(type, rest), count - i);
}

MOEFLUX_INLINE float widen_one(DType type, const uint8_t* from) {
  if (type == DType::f32) return load<float>(from);
  if (type == DType::u8) return half_powers(Words{} + *from)[0];
  if (type == DType::f8_e4m3) return from_e4m3(Words{} + *from)[0] * 0.5f;
  const Halves half = Halves{} + load<uint16_t>(from);
  return (type == DType::bf16 ? from_bf16(half) : from_f16(half))[0];
}

// ---- Formats: 32 columns as f32 ------------------------------------------------------------------------------------

template <DType type>
struct Plain {
  static constexpr bool affine = false;
  static constexpr int64_t stretch_bytes = stretch * (type == DType::f32 ? 4 : 2);
  struct Group {};

  MOEFLUX_INLINE Group group(float, float) { return {}; }
  MOEFLUX_INLINE void unpack(const Group&, const uint8_t* from, Floats (&out)[stretch_vectors]) {
    MOEFLUX_UNROLL
    for (int64_t v = 0; v < stretch_vectors; ++v) out[v] = widen(type, from + v * lanes * (stretch_bytes / stretch));
  }
};

template <int bits>
struct Affine {
  static constexpr bool affine = true;
  static constexpr int64_t stretch_bytes = stretch * bits / 8;
  struct Group {
    Floats scale;
    Floats bias;
  };

  MOEFLUX_INLINE Group group(float scale, float bias) { return {splat(scale), splat(bias)}; }
  MOEFLUX_INLINE void unpack(const Group& group, const uint8_t* from, Floats (&out)[stretch_vectors]) {
    uint8_t codes[stretch];
    if constexpr (bits != 8) {
      codes_to_bytes<bits>(from, codes);
      from = codes;
    }
    MOEFLUX_UNROLL
    for (int64_t v = 0; v < stretch_vectors; ++v) {
      out[v] = fma(__builtin_convertvector(load_bytes(from + v * lanes), Floats), group.scale, group.bias);
    }
  }
};

#if defined(__AVX512F__)
// The 16 numbers that a group can have are in one register. The low four bits of each lane look them up.
template <>
struct Affine<4> {
  static constexpr bool affine = true;
  static constexpr int64_t stretch_bytes = stretch / 2;
  struct Group {
    Floats numbers;
  };

  MOEFLUX_INLINE Group group(float scale, float bias) {
    const Floats code = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return {fma(code, splat(scale), splat(bias))};
  }
  MOEFLUX_INLINE void unpack(const Group& group, const uint8_t* from, Floats (&out)[stretch_vectors]) {
    const Words shifts = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
    MOEFLUX_UNROLL
    for (int64_t v = 0; v < stretch_vectors; ++v) {
      const __m512i low = _mm512_maskz_broadcastd_epi32(all_lanes, _mm_loadu_si32(from + v * 8));
      const __m512i both = _mm512_mask_broadcastd_epi32(low, 0xff00, _mm_loadu_si32(from + v * 8 + 4));
      out[v] = (Floats)_mm512_maskz_permutexvar_ps(all_lanes, (__m512i)((Words)both >> shifts), (__m512)group.numbers);
    }
  }
};
#endif

// Codes are floats. `scale` is half that of the group.
#if defined(__AVX512F__)
struct E2m1 : Affine<4> {
  MOEFLUX_INLINE Group group(float scale, float) {
    const Floats twice = {0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12};
    return {twice * splat(scale)};
  }
};
#elif defined(__AVX2__)
// The 8 numbers that a code can have beside its sign are in one register.
struct E2m1 {
  static constexpr bool affine = true;
  static constexpr int64_t stretch_bytes = stretch / 2;
  struct Group {
    Floats numbers;
  };

  MOEFLUX_INLINE Group group(float scale, float) {
    const Floats twice = {0, 1, 2, 3, 4, 6, 8, 12};
    return {twice * splat(scale)};
  }
  MOEFLUX_INLINE void unpack(const Group& group, const uint8_t* from, Floats (&out)[stretch_vectors]) {
    const Words shifts = {0, 4, 8, 12, 16, 20, 24, 28};
    MOEFLUX_UNROLL
    for (int64_t v = 0; v < stretch_vectors; ++v) {
      const Words codes = (Words{} + load<uint32_t>(from + v * 4)) >> shifts;
      const Words sizes = (Words)_mm256_permutevar8x32_ps((__m256)group.numbers, (__m256i)codes);
      out[v] = (Floats)(sizes ^ ((codes << 28) & 0x80000000u));
    }
  }
};
#else
struct E2m1 {
  static constexpr bool affine = true;
  static constexpr int64_t stretch_bytes = stretch / 2;
  struct Group {
    Floats scale;
  };

  MOEFLUX_INLINE Group group(float scale, float) { return {splat(scale)}; }
  // Without its sign, twice the number of a code is the code itself up to 4, and then 6, 8 and 12.
  MOEFLUX_INLINE void unpack(const Group& group, const uint8_t* from, Floats (&out)[stretch_vectors]) {
    typedef int8_t Bytes __attribute__((vector_size(16)));
    uint8_t codes[stretch];
    codes_to_bytes<4>(from, codes);
    int8_t numbers[stretch];
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < stretch; i += 16) {
      const Bytes code = load<Bytes>(codes + i);
      const Bytes size = code & 7;
      const Bytes twice = size + ((size - 4) & (size > 4)) + ((size == 7) & 2);
      const Bytes negative = code > 7;
      store(numbers + i, (twice ^ negative) - negative);
    }
    MOEFLUX_UNROLL
    for (int64_t v = 0; v < stretch_vectors; ++v)
      out[v] = __builtin_convertvector(load_codes(numbers + v * lanes), Floats) * group.scale;
  }
};
#endif

// NVFP4. A stretch is two groups.
struct E2m1Pairs {
  static constexpr bool affine = true;
  static constexpr int64_t stretch_bytes = E2m1::stretch_bytes;
  struct Group {
    E2m1::Group first;
    E2m1::Group second;
  };

  MOEFLUX_INLINE Group group(float first, float second) { return {E2m1::group(first, 0), E2m1::group(second, 0)}; }
  MOEFLUX_INLINE void unpack(const Group& group, const uint8_t* from, Floats (&out)[stretch_vectors]) {
    Floats other[stretch_vectors];
    E2m1::unpack(group.first, from, out);
    E2m1::unpack(group.second, from, other);
    MOEFLUX_UNROLL
    for (int64_t v = stretch_vectors / 2; v < stretch_vectors; ++v) out[v] = other[v];
  }
};

template <typename Format>
constexpr bool in_pairs = false;
template <>
constexpr bool in_pairs<E2m1Pairs> = true;

// A stretch of codes E4M3: a 256th of each number.
MOEFLUX_INLINE void e4m3_256ths(const uint8_t* from, Floats (&out)[stretch_vectors]) {
#if defined(__AVX2__)
  // Where a byte is widened with its sign, that stands twice before its other bits.
  typedef int8_t Bytes __attribute__((vector_size(2 * lanes)));
  typedef int16_t Wide __attribute__((vector_size(4 * lanes)));
  MOEFLUX_UNROLL
  for (int64_t v = 0; v < stretch_vectors; v += 2) {
    const Wide wide = __builtin_convertvector(load<Bytes>(from + v * lanes), Wide) << 7;
    const Wide halves = wide & static_cast<int16_t>(~0x4000);
    Halves each[2];
    __builtin_memcpy(each, &halves, sizeof halves);
    out[v] = from_f16(each[0]);
    out[v + 1] = from_f16(each[1]);
  }
#else
  MOEFLUX_UNROLL
  for (int64_t v = 0; v < stretch_vectors; ++v) out[v] = from_e4m3((Words)load_bytes(from + v * lanes)) * 0x1p-8f;
#endif
}

// Codes are floats of 8 bits. Scales that are powers of two come as half of what they are.
template <bool powers>
struct E4m3 {
  static constexpr bool affine = true;
  static constexpr int64_t stretch_bytes = stretch;
  struct Group {
    Floats scale;
  };

  // Numbers come as 256ths. Where scales are no powers of two, they make up for that: they are below 2^119.
  MOEFLUX_INLINE Group group(float scale, float) { return {splat(powers ? scale : 256 * scale)}; }
  MOEFLUX_INLINE void unpack(const Group& group, const uint8_t* from, Floats (&out)[stretch_vectors]) {
    e4m3_256ths(from, out);
    MOEFLUX_UNROLL
    for (int64_t v = 0; v < stretch_vectors; ++v) out[v] = (powers ? out[v] * 512.0f : out[v]) * group.scale;
  }
};

}  // namespace moeflux::cpu::MOEFLUX_ISA
