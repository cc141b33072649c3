// Sixteen rows of a quantised matrix, and their scales, for products of digits and codes (see int16.h). Scales are
// transposed, so that each row has a lane.
#include "kernels/cpu/block_codes.inl"
#include "kernels/cpu/lanes.h"

namespace moeflux::cpu::MOEFLUX_ISA {

constexpr int64_t code_rows = 16;    // matrix rows that are computed together, one per lane
constexpr int64_t scale_groups = 8;  // groups whose scales are transposed at once

// ---- Sixteen rows --------------------------------------------------------------------------------------------------

// Rows that lie `stride` bytes apart. Sixteen addresses are too many for the registers, so that of each row is a few
// strides from one of two.
struct SpacedRows {
  const uint8_t* first;
  int64_t stride;
  int64_t three;  // times the stride
  int64_t five;
  int64_t seven;
  int64_t eight;

  [[gnu::always_inline]] const uint8_t* row(int64_t r) const {
    const int64_t strides[8] = {0, stride, 2 * stride, three, 4 * stride, five, 2 * three, seven};
    return first + (r < 8 ? 0 : eight) + strides[r % 8];
  }
};

MOEFLUX_INLINE SpacedRows spaced_rows(const uint8_t* first, int64_t stride) {
  SpacedRows rows = {first, stride, 3 * stride, 5 * stride, 7 * stride, 8 * stride};
  // Otherwise the compiler would make sixteen addresses of them again.
  asm("" : "+r"(rows.three), "+r"(rows.five), "+r"(rows.seven), "+r"(rows.eight));
  return rows;
}

// Sixteen rows of the matrix that are computed together, and those of them that are wanted.
struct SixteenRows {
  int64_t first;
  __mmask16 wanted;
};

// Those from `row` on that come before `last` >= 16. If there are fewer, rows before them are computed again.
MOEFLUX_INLINE SixteenRows sixteen_rows(int64_t row, int64_t last) {
  const int64_t first = smaller(row, last - code_rows);
  return {first, static_cast<__mmask16>(all_lanes << (row - first))};
}

MOEFLUX_INLINE void store_wanted(const SixteenRows& rows, float* out, Floats sums) {
  _mm512_mask_storeu_ps(out + rows.first, rows.wanted, (__m512)sums);
}

// ---- Scales: lanes become matrix rows ------------------------------------------------------------------------------

// Transposes the scales of 16 rows, so that each row has a lane. Scales of two bytes are moved in pairs, as one lane.
template <DType type>
constexpr int64_t groups_a_lane = type == DType::f32 ? 1 : 2;

template <DType type>
MOEFLUX_INLINE void store_lane(__m512i lane, float (*to)[code_rows]) {
  if constexpr (type == DType::f32) {
    store(to[0], lane);
  } else if constexpr (type == DType::bf16) {
    store(to[0], _mm512_maskz_slli_epi32(all_lanes, lane, 16));
    store(to[1], _mm512_and_si512(lane, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  } else {
    store(to[0], from_f16(narrow((Words)lane & 0xffffu)));
    store(to[1], from_f16(narrow((Words)lane >> 16)));
  }
}

// Transposes 16 bytes of each of 16 rows: lane r of vector i has those from 4 * i on of row r. `there` says which bytes
// are; the others count as 0.
template <bool whole>
MOEFLUX_INLINE void turn_quarter_rows(const SpacedRows& rows, __mmask16 there, __m512i (&lane)[4]) {
  const auto part = [&](int64_t r) __attribute__((always_inline)) {
    return whole ? load<__m128i>(rows.row(r)) : _mm_maskz_loadu_epi8(there, rows.row(r));
  };
  // Each quarter of v[i] has row 4 * quarter + i.
  __m512i v[4];
  MOEFLUX_UNROLL
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm512_zextsi128_si512(part(i));
    MOEFLUX_UNROLL
    for (int quarter = 1; quarter < 4; ++quarter)
      v[i] = _mm512_mask_broadcast_i32x4(v[i], static_cast<__mmask16>(0xf << 4 * quarter), part(4 * quarter + i));
  }
  const __m512i low[2] = {_mm512_maskz_unpacklo_epi32(all_lanes, v[0], v[1]),
                          _mm512_maskz_unpacklo_epi32(all_lanes, v[2], v[3])};
  const __m512i high[2] = {_mm512_maskz_unpackhi_epi32(all_lanes, v[0], v[1]),
                           _mm512_maskz_unpackhi_epi32(all_lanes, v[2], v[3])};
  lane[0] = _mm512_maskz_unpacklo_epi64(0xff, low[0], low[1]);
  lane[1] = _mm512_maskz_unpackhi_epi64(0xff, low[0], low[1]);
  lane[2] = _mm512_maskz_unpacklo_epi64(0xff, high[0], high[1]);
  lane[3] = _mm512_maskz_unpackhi_epi64(0xff, high[0], high[1]);
}

// The same for the first `bytes` of them, up to 16.
MOEFLUX_INLINE void turn_quarter_rows(const SpacedRows& rows, int64_t bytes, __m512i (&lane)[4]) {
  if (bytes >= 16) return turn_quarter_rows<true>(rows, 0xffff, lane);
  turn_quarter_rows<false>(rows, static_cast<__mmask16>((1u << bytes) - 1), lane);
}

// Transposes scales, or biases, of `count` groups of 16 rows to out[g][r].
template <DType type>
MOEFLUX_INLINE void turn_scales(SpacedRows rows, int64_t count, float (&out)[scale_groups][code_rows]) {
  constexpr int64_t a_lane = groups_a_lane<type>;
  for (int64_t first = 0; first < count; first += 4 * a_lane, rows.first += 16) {
    __m512i lane[4];
    turn_quarter_rows(rows, (count - first) * (4 / a_lane), lane);
    MOEFLUX_UNROLL
    for (int i = 0; i < 4; ++i) store_lane<type>(lane[i], out + first + a_lane * i);
  }
}

struct Scales {
  alignas(64) float scales[scale_groups][code_rows];
  alignas(64) float biases[scale_groups][code_rows];
  alignas(64) float of_rows[code_rows];  // of NVFP4 only
};

// The same for scales of MXFP4, which are halved, and the biases that its codes need.
static void turn_powers(const SpacedRows& rows, int64_t count, Scales& to) {
  __m512i lane[4];
  turn_quarter_rows(rows, count, lane);
  MOEFLUX_UNROLL
  for (int g = 0; g < scale_groups; ++g) {
    const Floats scale = half_powers(((Words)lane[g / 4] >> (g % 4 * 8)) & 0xffu);
    store(to.scales[g], scale);
    store(to.biases[g], scale * -12.0f);
  }
}

// The same for scales of NVFP4, times those of the rows, with which rows of scales begin. These are loaded with the
// first groups.
static void turn_e4m3(const Weights& w, int64_t row, int64_t first, int64_t count, Scales& to) {
  const uint8_t* begin = w.scales + row * w.scale_stride;
  if (first == 0)
    for (int64_t r = 0; r < code_rows; ++r)
      to.of_rows[r] = w.row_scale_bytes ? load<float>(begin + r * w.scale_stride) : 1.0f;
  __m512i lane[4];
  turn_quarter_rows(spaced_rows(begin + w.row_scale_bytes + first, w.scale_stride), count, lane);
  const Floats of_rows = load<Floats>(to.of_rows);
  MOEFLUX_UNROLL
  for (int g = 0; g < scale_groups; ++g) {
    const Floats scale = from_e4m3(((Words)lane[g / 4] >> (g % 4 * 8)) & 0xffu) * 0.5f * of_rows;
    store(to.scales[g], scale);
    store(to.biases[g], scale * -12.0f);
  }
}

// The same for blocks. A row's eight scales and eight biases are one vector, and so are sixteen rows' of a group.
template <BlockType type, bool whole>
static void load_block_scales(const Weights& w, int64_t row, int64_t first, int64_t count, Scales& to) {
  __m512i v[code_rows];
  MOEFLUX_UNROLL
  for (int64_t r = 0; r < code_rows; ++r)
    v[r] = (__m512i)row_scales<type, whole>(w.codes + (row + r) * w.code_stride, first, count);
  turn(v);
  MOEFLUX_UNROLL
  for (int64_t g = 0; g < scale_groups; ++g) {
    store(to.scales[g], v[g]);
    store(to.biases[g], v[scale_groups + g]);
  }
}

// Loads scales and biases of groups first ... first + count - 1 for matrix rows row ... row + 15.
template <int bits>
static void load_scales(const Weights& w, int64_t row, int64_t first, int64_t count, Scales& to) {
  if constexpr (are_in_blocks(bits)) {
    constexpr BlockType type = block_type_of(bits);
    if (block_shape(type).columns == 256 || count == scale_groups)
      return load_block_scales<type, true>(w, row, first, count, to);
    return load_block_scales<type, false>(w, row, first, count, to);
  }
  if (w.scale_type == DType::f8_e4m3) return turn_e4m3(w, row, first, count, to);
  const int64_t at = row * w.scale_stride + first * scale_bytes_of(w.scale_type);
  const SpacedRows scales = spaced_rows(w.scales + at, w.scale_stride);
  const SpacedRows biases = spaced_rows(w.biases + at, w.scale_stride);
  if (w.scale_type == DType::u8) return turn_powers(scales, count, to);
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

}  // namespace moeflux::cpu::MOEFLUX_ISA
