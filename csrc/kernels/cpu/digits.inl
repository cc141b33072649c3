#include "kernels/cpu/digits.h"
#include "kernels/cpu/simd.h"

namespace moeflux::cpu::MOEFLUX_ISA {

// ---- Numbers --------------------------------------------------------------------------------------------------------

MOEFLUX_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}
MOEFLUX_INLINE float float_of(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}
// Rounded once, on every machine.
MOEFLUX_INLINE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// As cuda/basics.h has it, word for word.
MOEFLUX_INLINE float digit_exp(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
  const float shifted = fused(x, 1.44269502f, 12582912.0f), n = shifted - 12582912.0f;
  const float rest = fused(n, 2.12194440e-4f, fused(n, -0.693359375f, x));
  float power = fused(1.39354309e-3f, rest, 8.36575683e-3f);
  power = fused(power, rest, 4.16664667e-2f);
  power = fused(power, rest, 0.166666657f);
  power = fused(power, rest, 0.5f);
  power = fused(power * rest, rest, rest) + 1.0f;
  const uint32_t exponent = bits_of(shifted) - 0x4b400000u + 256u, half = exponent >> 1;
  return power * float_of((half - 1u) << 23) * float_of((exponent - half - 1u) << 23);
}
MOEFLUX_INLINE float digit_sigmoid(float x) { return 1.0f / (1.0f + digit_exp(-x)); }

static void digit_exps(const float* x, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = digit_exp(x[i]);
}

static void digit_join(const float* gate, const float* up, float* out, int64_t count, const DigitJoin& how) {
  const float alpha = how.alpha, limit = how.limit;
  if (limit > 0) {
    for (int64_t i = 0; i < count; ++i) {
      const float g = gate[i] > limit ? limit : gate[i];
      float u = up[i] > limit ? limit : up[i];
      u = u < -limit ? -limit : u;
      out[i] = g * digit_sigmoid(g * alpha) * (u + 1.0f);
    }
  } else if (how.is_geglu) {
    for (int64_t i = 0; i < count; ++i) {
      const float g = gate[i];
      out[i] = g * digit_sigmoid(g * (1.5957691216f + 0.0713548163f * (g * g))) * up[i];
    }
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = gate[i] * digit_sigmoid(gate[i]) * up[i];
  }
}

// ---- x as digits ----------------------------------------------------------------------------------------------------

// Column i of a step has its digits at this place. Where vectors take codes of several columns from one byte, it is the
// order in which the codes come out.
MOEFLUX_INLINE int64_t place_in_step(int bits, int64_t i) {
#if defined(__AVX2__)
  if (bits == 4) return i / 2 + i % 2 * 16;
  if (bits == 2) return i / 4 + i % 4 * 8;
#endif
  return static_cast<void>(bits), i;
}

static void digit_convert(const Weights& weights, const float* x, uint8_t* row) {
  const int64_t columns = weights.columns, group = weights.group_size, groups = columns / group;
  auto* units = reinterpret_cast<float*>(row + columns * digits_of_number);
  float* sums = units + digit_groups(columns, group);
  uint8_t place[digit_step];
  for (int64_t i = 0; i < digit_step; ++i) place[i] = static_cast<uint8_t>(place_in_step(weights.bits, i));
  for (int64_t g = 0; g < digit_groups(columns, group); ++g) {
    units[g] = sums[g] = 0;
    if (g >= groups) continue;
    const float* from = x + g * group;
    uint32_t most = 0;  // without signs, bits are in the order of the numbers
    for (int64_t i = 0; i < group; ++i) {
      const uint32_t size = bits_of(from[i]) & 0x7fffffffu;
      most = size > most ? size : most;
    }
    const bool is_finite = most < 0x7f800000u;
    const uint32_t exponent = (most >> 23) > 22u ? most >> 23 : 22u;
    const float up = is_finite ? float_of((275u - exponent) << 23) : 0.0f;  // the largest to 2^21 ... 2^22
    units[g] = is_finite ? float_of((exponent - 21u) << 23) : float_of(0x7fc00000u);
    int32_t sum = 0;
    for (int64_t first = 0; first < group; first += digit_step) {
      uint32_t whole[digit_step];  // the nearest whole number, the even one of two, and 0x808080 more
      for (int64_t i = 0; i < digit_step; ++i) {
        const float shifted = from[first + i] * up + 12582912.0f;
        whole[i] = is_finite ? bits_of(shifted) - 0x4b400000u + 0x808080u : 0x808080u;
      }
      for (int64_t i = 0; i < digit_step; ++i) sum += static_cast<int32_t>(whole[i] - 0x808080u);
      uint8_t* to = row + (g * group + first) * digits_of_number;
      for (int64_t i = 0; i < digit_step; ++i)
        for (int64_t d = 0; d < digits_of_number; ++d)
          to[d * digit_step + place[i]] = static_cast<uint8_t>((whole[i] >> (8 * d)) ^ 0x80u);
    }
    sums[g] = static_cast<float>(sum);
  }
}

// ---- Products -------------------------------------------------------------------------------------------------------

// Scale and bias of a group, by which its sum and the sum of its x are multiplied.
struct DigitScaling {
  float scale;
  float bias;
};

#if !defined(__AVX2__)

// The definition, a code at a time.
MOEFLUX_INLINE int32_t digit_code(const Weights& weights, const uint8_t* codes, int64_t column) {
  const int64_t at = column * weights.bits, in_byte = at % 8;
  uint32_t stored = codes[at / 8];
  if (in_byte + weights.bits > 8) stored |= static_cast<uint32_t>(codes[at / 8 + 1]) << 8;
  const auto code = static_cast<int32_t>(stored >> in_byte & ((1u << weights.bits) - 1u));
  if (weights.scale_type != DType::u8) return code;
  constexpr int8_t twice[8] = {0, 1, 2, 3, 4, 6, 8, 12};  // the sizes of E2M1
  return digit_e2m1_zero + (code & 8 ? -twice[code & 7] : twice[code & 7]);
}

MOEFLUX_INLINE float digit_number(const uint8_t* numbers, int64_t i, DType type) {
  if (type == DType::f32) return load<float>(numbers + i * 4);
  const auto half = load<uint16_t>(numbers + i * 2);
  return type == DType::bf16 ? float_of(static_cast<uint32_t>(half) << 16) : from_f16(Halves{half})[0];
}

MOEFLUX_INLINE DigitScaling digit_scaling(const Weights& weights, int64_t row, int64_t group) {
  const uint8_t* scales = weights.scales + row * weights.scale_stride;
  if (weights.scale_type == DType::u8) {  // the exponent of a power of two; 0 is subnormal
    const uint32_t exponent = scales[group];
    const float half = float_of(exponent > 0 ? exponent << 23 : 0x00400000u) * 0.5f;
    return {half, half * -static_cast<float>(digit_e2m1_zero)};
  }
  return {digit_number(scales, group, weights.scale_type),
          digit_number(weights.biases + row * weights.scale_stride, group, weights.scale_type)};
}

static void digit_multiply(const Weights& weights, int64_t first, int64_t last, const uint8_t* row, float* out) {
  const int64_t columns = weights.columns, group = weights.group_size;
  const auto* units = reinterpret_cast<const float*>(row + columns * digits_of_number);
  const float* of_x = units + digit_groups(columns, group);
  for (int64_t r = first; r < last; ++r) {
    const uint8_t* codes = weights.codes + r * weights.code_stride;
    float total = 0, part = 0;
    for (int64_t begin = 0; begin < columns; begin += group) {
      int32_t sums[digits_of_number] = {};
      for (int64_t column = begin; column < begin + group; ++column)
        for (int64_t d = 0; d < digits_of_number; ++d) {
          const int64_t step = column / digit_step * digit_step;
          const auto digit = static_cast<int8_t>(row[step * digits_of_number + d * digit_step + column - step]);
          sums[d] += digit_code(weights, codes, column) * digit;
        }
      const int64_t g = begin / group;
      const DigitScaling by = digit_scaling(weights, r, g);
      const float all = fused(static_cast<float>(sums[2]), 65536.0f, static_cast<float>(sums[1] * 256 + sums[0]));
      part = fused(fused(by.scale, all, by.bias * of_x[g]), units[g], part);
      if ((begin + group) % digit_part != 0 && begin + group < columns) continue;
      total += part;
      part = 0;
    }
    out[r] = total;
  }
}

#else

// Of 32 columns the codes as bytes, in the order of place_in_step. `from` has so many bytes, and nothing is read
// beyond.
template <int bits, bool is_e2m1>
MOEFLUX_INLINE __m256i digit_codes(const uint8_t* from) {
  if constexpr (bits == 8) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  } else if constexpr (bits == 4) {
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m256i codes =
        _mm256_and_si256(_mm256_srlv_epi32(both, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4)), _mm256_set1_epi8(15));
    if constexpr (!is_e2m1) return codes;
    const __m128i values = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), codes);
  } else if constexpr (bits == 2) {
    const __m256i all = _mm256_set1_epi64x(load<int64_t>(from));
    return _mm256_and_si256(_mm256_srlv_epi64(all, _mm256_setr_epi64x(0, 2, 4, 6)), _mm256_set1_epi8(3));
  } else {
    uint64_t words[4];
    for (int64_t pack = 0; pack < 4; ++pack) {
      uint64_t stored = 0, spread = 0;
      __builtin_memcpy(&stored, from + pack * bits, bits);
      MOEFLUX_UNROLL
      for (int i = 0; i < 8; ++i) spread |= (stored >> (bits * i) & ((1u << bits) - 1u)) << (8 * i);
      words[pack] = spread;
    }
    return load<__m256i>(words);
  }
}

// What a group comes to, in eight lanes to be added: s1 * 256 + s0, and s2.
struct DigitSums {
  __m256i low;
  __m256i high;
};

// Products of two bytes are added in 16 bits, which hold those of two steps: 4 * 63 * 128. Codes of 8 bits go as two
// halves.
template <int bits, bool is_e2m1, int group>
MOEFLUX_INLINE DigitSums digit_group(const uint8_t* codes, const uint8_t* digits) {
  constexpr int steps = group / digit_step, together = steps > 1 ? 2 : 1;
  const __m256i one = _mm256_set1_epi16(1);
  DigitSums sums = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  MOEFLUX_UNROLL
  for (int step = 0; step < steps; step += together) {
    constexpr int halves = bits == 8 ? 2 : 1;
    __m256i words[halves][digits_of_number];
    MOEFLUX_UNROLL
    for (int j = 0; j < together; ++j) {
      const __m256i bytes = digit_codes<bits, is_e2m1>(codes + (step + j) * (4 * bits));
      MOEFLUX_UNROLL
      for (int half = 0; half < halves; ++half) {
        __m256i own = bytes;
        if constexpr (halves == 2)
          own = _mm256_and_si256(half ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15));
        MOEFLUX_UNROLL
        for (int d = 0; d < digits_of_number; ++d) {
          const auto* from = digits + (step + j) * (digit_step * digits_of_number) + d * digit_step;
          const __m256i products =
              _mm256_maddubs_epi16(own, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
          words[half][d] = j ? _mm256_add_epi16(words[half][d], products) : products;
        }
      }
    }
    MOEFLUX_UNROLL
    for (int half = 0; half < halves; ++half) {
      const __m256i by = half ? _mm256_set1_epi16(16) : one, by_256 = _mm256_set1_epi16(half ? 4096 : 256);
      sums.low = _mm256_add_epi32(
          sums.low, _mm256_add_epi32(_mm256_madd_epi16(words[half][0], by), _mm256_madd_epi16(words[half][1], by_256)));
      sums.high = _mm256_add_epi32(sums.high, _mm256_madd_epi16(words[half][2], by));
    }
  }
  return sums;
}

// Lane i is the sum of the lanes of vector i.
MOEFLUX_INLINE __m256i sums_of_eight(const __m256i (&v)[digit_together]) {
  const __m256i first = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
  const __m256i second = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
  return _mm256_add_epi32(_mm256_permute2x128_si256(first, second, 0x20),
                          _mm256_permute2x128_si256(first, second, 0x31));
}

// Numbers of `count` groups, eight at most, from the first on; then zeros.
MOEFLUX_INLINE __m256 digit_numbers(const uint8_t* from, DType type, int64_t count) {
  const int64_t bytes = type == DType::f32 ? 4 : type == DType::u8 ? 1 : 2;
  alignas(32) uint8_t room[digit_together * 4];
  if (count < digit_together) {
    __builtin_memset(room, 0, sizeof room);
    __builtin_memcpy(room, from, static_cast<size_t>(count * bytes));
    from = room;
  }
  if (type == DType::f32) return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
  if (type == DType::u8) {
    const __m256i exponents = _mm256_cvtepu8_epi32(_mm_loadu_si64(from));
    return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_slli_epi32(exponents, 23), _mm256_set1_epi32(0x00400000)));
  }
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  if (type == DType::f16) return _mm256_cvtph_ps(halves);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

template <int bits, bool is_e2m1, int group>
static void multiply_digits(const Weights& weights, int64_t first, int64_t last, const uint8_t* row, float* out) {
  constexpr int64_t of_part = digit_part / group, code_bytes = group / 8 * bits;
  const int64_t groups = weights.columns / group;
  const int64_t scale_bytes = is_e2m1 ? 1 : weights.scale_type == DType::f32 ? 4 : 2;
  const DType type = is_e2m1 ? DType::u8 : weights.scale_type;
  const auto* units = reinterpret_cast<const float*>(row + weights.columns * digits_of_number);
  const float* of_x = units + digit_groups(weights.columns, group);
  for (int64_t r = first; r < last; ++r) {
    const uint8_t* codes = weights.codes + r * weights.code_stride;
    const uint8_t* scales = weights.scales + r * weights.scale_stride;
    const uint8_t* biases = weights.biases + r * weights.scale_stride;
    float total = 0, part = 0;
    for (int64_t begin = 0; begin < groups; begin += digit_together) {
      const int64_t here = groups - begin < digit_together ? groups - begin : digit_together;
      __m256i low[digit_together], high[digit_together];
      for (int64_t g = 0; g < digit_together; ++g) {
        DigitSums sums = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        if (g < here)
          sums = digit_group<bits, is_e2m1, group>(codes + (begin + g) * code_bytes,
                                                   row + (begin + g) * (group * digits_of_number));
        low[g] = sums.low;
        high[g] = sums.high;
      }
      const __m256 all = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums_of_eight(high)), _mm256_set1_ps(65536.0f),
                                         _mm256_cvtepi32_ps(sums_of_eight(low)));
      __m256 scale = digit_numbers(scales + begin * scale_bytes, type, here), bias;
      if constexpr (is_e2m1) {
        scale = _mm256_mul_ps(scale, _mm256_set1_ps(0.5f));
        bias = _mm256_mul_ps(scale, _mm256_set1_ps(-static_cast<float>(digit_e2m1_zero)));
      } else {
        bias = digit_numbers(biases + begin * scale_bytes, type, here);
      }
      alignas(32) float scaled[digit_together];
      _mm256_store_ps(scaled, _mm256_fmadd_ps(scale, all, _mm256_mul_ps(bias, _mm256_loadu_ps(of_x + begin))));
      for (int64_t g = 0; g < here; ++g) {
        part = fused(scaled[g], units[begin + g], part);
        if ((g + 1) % of_part != 0 && begin + g + 1 < groups) continue;
        total += part;
        part = 0;
      }
    }
    out[r] = total;
  }
}

template <int bits, bool is_e2m1 = false>
static void multiply_digits(const Weights& weights, int64_t first, int64_t last, const uint8_t* row, float* out) {
  if (weights.group_size == 32) return multiply_digits<bits, is_e2m1, 32>(weights, first, last, row, out);
  if constexpr (!is_e2m1) {
    if (weights.group_size == 64) return multiply_digits<bits, false, 64>(weights, first, last, row, out);
    multiply_digits<bits, false, 128>(weights, first, last, row, out);
  }
}

static void digit_multiply(const Weights& weights, int64_t first, int64_t last, const uint8_t* row, float* out) {
  if (weights.scale_type == DType::u8) return multiply_digits<4, true>(weights, first, last, row, out);
  switch (weights.bits) {
    case 2:
      return multiply_digits<2>(weights, first, last, row, out);
    case 3:
      return multiply_digits<3>(weights, first, last, row, out);
    case 4:
      return multiply_digits<4>(weights, first, last, row, out);
    case 5:
      return multiply_digits<5>(weights, first, last, row, out);
    case 6:
      return multiply_digits<6>(weights, first, last, row, out);
    default:
      return multiply_digits<8>(weights, first, last, row, out);
  }
}

#endif

constexpr DigitKernels digit_kernels{digit_convert, digit_multiply, digit_join, digit_exps};

}  // namespace moeflux::cpu::MOEFLUX_ISA
