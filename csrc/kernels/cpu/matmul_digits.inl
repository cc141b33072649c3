// Products of digits and codes, see digits.h. AVX-512 VNNI: 4 products of bytes a lane and instruction.
//
// A vector holds parts of one matrix row's sum. Those of sixteen rows are added up together, so that lanes become rows,
// and a group's scales are turned the same way.
#include "kernels/cpu/digits.inl"

namespace moeflux::cpu::MOEFLUX_ISA {

constexpr int64_t code_rows = 16;     // matrix rows that are computed together, one a lane
constexpr int64_t scale_groups = 32;  // groups whose scales are turned to lanes at once

// ---- Scales: lanes become matrix rows ------------------------------------------------------------------------------

// Of 16 vectors of 16 lanes, lane c of vector r becomes lane r of vector c.
MOEFLUX_INLINE void turn(__m512i (&v)[16]) {
  __m512i t[16];
  MOEFLUX_UNROLL
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_maskz_unpacklo_epi32(all_lanes, v[i], v[i + 1]);
    t[i + 1] = _mm512_maskz_unpackhi_epi32(all_lanes, v[i], v[i + 1]);
  }
  MOEFLUX_UNROLL
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_maskz_unpacklo_epi64(0xff, t[i], t[i + 2]);
    v[i + 1] = _mm512_maskz_unpackhi_epi64(0xff, t[i], t[i + 2]);
    v[i + 2] = _mm512_maskz_unpacklo_epi64(0xff, t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_maskz_unpackhi_epi64(0xff, t[i + 1], t[i + 3]);
  }
  MOEFLUX_UNROLL
  for (int i = 0; i < 4; ++i) {
    MOEFLUX_UNROLL
    for (int half = 0; half < 16; half += 8) {
      t[half + i] = _mm512_maskz_shuffle_i32x4(all_lanes, v[half + i], v[half + i + 4], 0x88);
      t[half + i + 4] = _mm512_maskz_shuffle_i32x4(all_lanes, v[half + i], v[half + i + 4], 0xdd);
    }
  }
  MOEFLUX_UNROLL
  for (int i = 0; i < 8; ++i) {
    v[i] = _mm512_maskz_shuffle_i32x4(all_lanes, t[i], t[i + 8], 0x88);
    v[i + 8] = _mm512_maskz_shuffle_i32x4(all_lanes, t[i], t[i + 8], 0xdd);
  }
}

// Scales, or biases, of `count` <= scale_groups groups of 16 rows: out[g][r]. from[r] is the first group's of row r.
template <DType type>
static void turn_scales(const uint8_t* const (&from)[code_rows], int64_t count, float (&out)[scale_groups][code_rows]) {
  // Two halves that stand side by side are turned as one lane.
  constexpr int64_t a_lane = type == DType::f32 ? 1 : 2;
  for (int64_t first = 0; first < count; first += 16 * a_lane) {
    const int64_t bytes = (count - first < 16 * a_lane ? count - first : 16 * a_lane) * (4 / a_lane);
    const __mmask64 there = bytes == 64 ? ~__mmask64{0} : (__mmask64{1} << bytes) - 1;
    __m512i v[16];
    MOEFLUX_UNROLL
    for (int r = 0; r < 16; ++r) v[r] = _mm512_maskz_loadu_epi8(there, from[r] + first * (4 / a_lane));
    turn(v);
    float (*to)[code_rows] = out + first;
    MOEFLUX_UNROLL
    for (int c = 0; c < 16; ++c) {
      if constexpr (type == DType::f32) {
        store(to[c], v[c]);
      } else if constexpr (type == DType::bf16) {
        store(to[2 * c], _mm512_maskz_slli_epi32(all_lanes, v[c], 16));
        store(to[2 * c + 1], _mm512_and_si512(v[c], _mm512_set1_epi32(static_cast<int>(0xffff0000))));
      } else {
        store(to[2 * c], from_f16(narrow((Words)v[c] & 0xffffu)));
        store(to[2 * c + 1], from_f16(narrow((Words)v[c] >> 16)));
      }
    }
  }
}

struct Scales {
  alignas(64) float scales[scale_groups][code_rows];
  alignas(64) float biases[scale_groups][code_rows];
};

// Of groups first ... first + count - 1 of matrix rows row ... row + 15; rows behind `last` get those of the row before
// it.
static void load_scales(const Weights& w, int64_t row, int64_t last, int64_t first, int64_t count, Scales& to) {
  const uint8_t* scales[code_rows];
  const uint8_t* biases[code_rows];
  for (int64_t r = 0; r < code_rows; ++r) {
    const int64_t at =
        (row + r < last ? row + r : last - 1) * w.scale_stride + first * (w.scale_type == DType::f32 ? 4 : 2);
    scales[r] = w.scales + at;
    biases[r] = w.biases + at;
  }
  if (w.scale_type == DType::bf16) {
    turn_scales<DType::bf16>(scales, count, to.scales);
    turn_scales<DType::bf16>(biases, count, to.biases);
  } else if (w.scale_type == DType::f16) {
    turn_scales<DType::f16>(scales, count, to.scales);
    turn_scales<DType::f16>(biases, count, to.biases);
  } else {
    turn_scales<DType::f32>(scales, count, to.scales);
    turn_scales<DType::f32>(biases, count, to.biases);
  }
}

// ---- Sums of 16 matrix rows ----------------------------------------------------------------------------------------

// What each row's vector adds up to, a row a lane; for groups of 32 what the columns of the first and of the second
// half of the block add up to.
struct RowSums {
  __m512i first;
  __m512i second;
};

template <int64_t group_size>
MOEFLUX_INLINE RowSums sums_of_rows(__m512i (&v)[16]) {
  // Neighbouring lanes twice: then a lane of 128 bits has a quarter of the sums of 4 rows.
  MOEFLUX_UNROLL
  for (int i = 0; i < 8; ++i)
    v[i] = _mm512_add_epi32(_mm512_maskz_unpacklo_epi32(all_lanes, v[2 * i], v[2 * i + 1]),
                            _mm512_maskz_unpackhi_epi32(all_lanes, v[2 * i], v[2 * i + 1]));
  MOEFLUX_UNROLL
  for (int i = 0; i < 4; ++i)
    v[i] = _mm512_add_epi32(_mm512_maskz_unpacklo_epi64(0xff, v[2 * i], v[2 * i + 1]),
                            _mm512_maskz_unpackhi_epi64(0xff, v[2 * i], v[2 * i + 1]));
  // Even columns below 32, even ones above, odd ones below, odd ones above: the same half of the block comes together.
  MOEFLUX_UNROLL
  for (int i = 0; i < 2; ++i)
    v[i] = _mm512_add_epi32(_mm512_maskz_shuffle_i32x4(all_lanes, v[2 * i], v[2 * i + 1], 0x44),
                            _mm512_maskz_shuffle_i32x4(all_lanes, v[2 * i], v[2 * i + 1], 0xee));
  const __m512i below = _mm512_maskz_shuffle_i32x4(all_lanes, v[0], v[1], 0x88);
  const __m512i above = _mm512_maskz_shuffle_i32x4(all_lanes, v[0], v[1], 0xdd);
  if constexpr (group_size == 32) return {below, above};
  return {_mm512_add_epi32(below, above), _mm512_setzero_si512()};
}

constexpr int64_t panel_blocks = 4;

// Codes of 16 matrix rows, a block after the other.
struct CodePanel {
  alignas(64) uint8_t codes[panel_blocks][code_rows][digit_block];
};

MOEFLUX_INLINE __m512i dot(__m512i sum, __m512i codes, __m512i digits) {
  return _mm512_dpbusd_epi32(sum, codes, digits);
}

// Sums of code * q over a step's blocks, as f32: exact but for one rounding.
struct GroupSums {
  Floats first;
  Floats second;
};

MOEFLUX_INLINE Floats floats(__m512i sums) { return (Floats)_mm512_maskz_cvtepi32_ps(all_lanes, sums); }

template <int64_t group_size, int64_t blocks>
MOEFLUX_INLINE GroupSums sums_of_group(const uint8_t (*codes)[code_rows][digit_block], const uint8_t* digits) {
  __m512i high[blocks], middle[blocks], low[blocks];
  MOEFLUX_UNROLL
  for (int64_t b = 0; b < blocks; ++b) {
    high[b] = load<__m512i>(digits + b * digit_block_bytes);
    middle[b] = load<__m512i>(digits + b * digit_block_bytes + digit_block);
    low[b] = load<__m512i>(digits + b * digit_block_bytes + 2 * digit_block);
  }
  __m512i v[code_rows];
  const auto add = [&](int64_t r, __m512i sum, const __m512i(&of)[blocks]) __attribute__((always_inline)) {
    MOEFLUX_UNROLL
    for (int64_t b = 0; b < blocks; ++b) sum = dot(sum, load<__m512i>(codes[b][r]), of[b]);
    return sum;
  };
  const auto one_up = [](__m512i sum)
                          __attribute__((always_inline)) { return _mm512_maskz_slli_epi32(all_lanes, sum, 8); };
  MOEFLUX_UNROLL
  for (int64_t r = 0; r < code_rows; ++r)
    v[r] = add(r, one_up(add(r, one_up(add(r, _mm512_setzero_si512(), high)), middle)), low);
  const RowSums sums = sums_of_rows<group_size>(v);
  return {floats(sums.first), floats(sums.second)};
}

// ---- Sixteen rows of the matrix ------------------------------------------------------------------------------------

// total + a group's part of the product: the one place that rounds.
MOEFLUX_INLINE Floats add_group(Floats total, Floats sum, Floats scale, Floats bias, Floats unit, Floats x_sum) {
  return fma(bias, x_sum, fma(sum, scale * unit, total));
}

// The codes of columns column ... column + 64 * blocks - 1 of 16 rows; rows behind `last` are the row before it.
template <int bits, int64_t group_size>
MOEFLUX_INLINE void unpack_panel(const Weights& w, int64_t row, int64_t last, int64_t column, int64_t blocks,
                                 CodePanel& panel) {
  for (int64_t r = 0; r < code_rows; ++r) {
    const uint8_t* from = w.codes + (row + r < last ? row + r : last - 1) * w.code_stride + column * bits / 8;
    for (int64_t b = 0; b < blocks; ++b, from += digit_block * bits / 8) {
      store(panel.codes[b][r],
            group_size == 32 ? codes_of<bits>(from, w.columns - column - b * digit_block) : codes_of<bits>(from));
    }
  }
}

// Asks for `lines` cache lines from an address that may lie behind the matrix.
template <int64_t lines>
MOEFLUX_INLINE void prefetch_lines(const uint8_t* from, int64_t offset) {
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < lines; ++i)
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(from) + offset + i * 64));
}

template <int bits, int64_t group_size, int64_t fixed_n>
static void multiply_few(const Weights& w, int64_t row, int64_t last, const uint8_t* const* x, float* const* out,
                         int64_t any_n) {
  constexpr int64_t step_blocks = group_size == 128 ? 2 : 1;
  constexpr int64_t step_groups = step_blocks * digit_block / group_size;
  const int64_t n = fixed_n ? fixed_n : any_n;
  const int64_t groups = w.columns / group_size;
  Floats total[fixed_n ? fixed_n : max_block] = {};
  Scales scales;
  CodePanel panel;
  for (int64_t g = 0; g < groups;) {
    if (g % scale_groups == 0)
      load_scales(w, row, last, g, groups - g < scale_groups ? groups - g : scale_groups, scales);
    const int64_t column = g * group_size;
    const int64_t left = digit_blocks(w.columns - column);
    const int64_t blocks = left < panel_blocks ? left : panel_blocks;
    unpack_panel<bits, group_size>(w, row, last, column, blocks, panel);
    for (int64_t b = 0; b < blocks; b += step_blocks, g += step_groups) {
      const int64_t done = column / digit_block + b;
      prefetch_lines<2 * bits * step_blocks>(w.codes, (row + code_rows) * w.code_stride + done * 128 * bits);
      const int64_t ss = code_rows * w.scale_stride * step_blocks / digit_blocks(w.columns);
      prefetch_lines<1>(w.scales, (row + code_rows) * w.scale_stride + done * ss);
      prefetch_lines<1>(w.biases, (row + code_rows) * w.scale_stride + done * ss);
      const float* scale = scales.scales[g % scale_groups];
      const float* bias = scales.biases[g % scale_groups];
      for (int64_t i = 0; i < n; ++i) {
        const DigitRow from = digit_row(x[i], w.columns, group_size);
        const GroupSums sums = sums_of_group<group_size, step_blocks>(
            panel.codes + b, from.digits + (column / digit_block + b) * digit_block_bytes);
        total[i] = add_group(total[i], sums.first, load<Floats>(scale), load<Floats>(bias), splat(from.units[g]),
                             splat(from.sums[g]));
        if (group_size == 32 && g + 1 < groups)
          total[i] = add_group(total[i], sums.second, load<Floats>(scale + code_rows), load<Floats>(bias + code_rows),
                               splat(from.units[g + 1]), splat(from.sums[g + 1]));
      }
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    if (last - row >= code_rows)
      store(out[i] + row, total[i]);
    else
      store_some(out[i] + row, total[i], last - row);
  }
}

template <int bits, int64_t group_size>
static void multiply_groups(const Weights& w, int64_t first, int64_t last, const uint8_t* const* x, float* const* out,
                            int64_t n) {
  for (; first < last; first += code_rows) {
    if (n == 1)
      multiply_few<bits, group_size, 1>(w, first, last, x, out, n);
    else
      multiply_few<bits, group_size, 0>(w, first, last, x, out, n);
  }
}

template <int bits>
static void multiply_codes(const Weights& w, int64_t first, int64_t last, const uint8_t* const* x, float* const* out,
                           int64_t n) {
  if (w.group_size == 32) return multiply_groups<bits, 32>(w, first, last, x, out, n);
  if (w.group_size == 64) return multiply_groups<bits, 64>(w, first, last, x, out, n);
  return multiply_groups<bits, 128>(w, first, last, x, out, n);
}

static void multiply_digits(const Weights& weights, int64_t first, int64_t last, const uint8_t* const* x,
                            float* const* out, int64_t n) {
  switch (weights.bits) {
    case 2:
      return multiply_codes<2>(weights, first, last, x, out, n);
    case 3:
      return multiply_codes<3>(weights, first, last, x, out, n);
    default:
      return multiply_codes<4>(weights, first, last, x, out, n);
  }
}

constexpr DigitKernels digit_kernels{convert_to_digits, multiply_digits};

}  // namespace moeflux::cpu::MOEFLUX_ISA
