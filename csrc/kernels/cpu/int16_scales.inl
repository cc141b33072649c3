// The scales of quantised matrices for products of digits and codes (see int16.h). Those of 16 matrix rows are
// transposed, so that each row has a lane.
#include "kernels/cpu/int16.inl"
#include "kernels/cpu/lanes.h"

namespace moeflux::cpu::MOEFLUX_ISA {

constexpr int64_t code_rows = 16;     // matrix rows that are computed together, one per lane
constexpr int64_t scale_groups = 32;  // groups whose scales are transposed at once

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

// Transposes scales, or biases, of `count` groups of 16 rows to out[g][r]. from[r] is that of the first group of row r.
// It is for at most a quarter of a vector of each row: each quarter of v[i] has row 4 * quarter + i.
template <DType type>
MOEFLUX_INLINE void turn_few_scales(const uint8_t* const (&from)[code_rows], int64_t count,
                                    float (&out)[scale_groups][code_rows]) {
  const auto there = static_cast<__mmask16>((1u << count * (4 / groups_a_lane<type>)) - 1);
  __m512i v[4];
  MOEFLUX_UNROLL
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm512_zextsi128_si512(_mm_maskz_loadu_epi8(there, from[i]));
    MOEFLUX_UNROLL
    for (int quarter = 1; quarter < 4; ++quarter)
      v[i] = _mm512_mask_broadcast_i32x4(v[i], static_cast<__mmask16>(0xf << 4 * quarter),
                                         _mm_maskz_loadu_epi8(there, from[4 * quarter + i]));
  }
  const __m512i low[2] = {_mm512_maskz_unpacklo_epi32(all_lanes, v[0], v[1]),
                          _mm512_maskz_unpacklo_epi32(all_lanes, v[2], v[3])};
  const __m512i high[2] = {_mm512_maskz_unpackhi_epi32(all_lanes, v[0], v[1]),
                           _mm512_maskz_unpackhi_epi32(all_lanes, v[2], v[3])};
  store_lane<type>(_mm512_maskz_unpacklo_epi64(0xff, low[0], low[1]), out);
  store_lane<type>(_mm512_maskz_unpackhi_epi64(0xff, low[0], low[1]), out + groups_a_lane<type>);
  store_lane<type>(_mm512_maskz_unpacklo_epi64(0xff, high[0], high[1]), out + 2 * groups_a_lane<type>);
  store_lane<type>(_mm512_maskz_unpackhi_epi64(0xff, high[0], high[1]), out + 3 * groups_a_lane<type>);
}

// The same for count <= scale_groups.
template <DType type>
static void turn_scales(const uint8_t* const (&from)[code_rows], int64_t count, float (&out)[scale_groups][code_rows]) {
  constexpr int64_t a_lane = groups_a_lane<type>;
  if (count <= 4 * a_lane) return turn_few_scales<type>(from, count, out);
  for (int64_t first = 0; first < count; first += 16 * a_lane) {
    const int64_t bytes = (count - first < 16 * a_lane ? count - first : 16 * a_lane) * (4 / a_lane);
    const __mmask64 there = bytes == 64 ? ~__mmask64{0} : (__mmask64{1} << bytes) - 1;
    __m512i v[16];
    MOEFLUX_UNROLL
    for (int r = 0; r < 16; ++r) v[r] = _mm512_maskz_loadu_epi8(there, from[r] + first * (4 / a_lane));
    turn(v);
    MOEFLUX_UNROLL
    for (int c = 0; c < 16; ++c) store_lane<type>(v[c], out + first + a_lane * c);
  }
}

struct Scales {
  alignas(64) float scales[scale_groups][code_rows];
  alignas(64) float biases[scale_groups][code_rows];
};

// The same for scales of MXFP4, which are halved, and the biases that its codes need.
static void turn_powers(const uint8_t* const (&from)[code_rows], int64_t count, Scales& to) {
  const __mmask64 there = (__mmask64{1} << count) - 1;
  __m512i v[16];
  MOEFLUX_UNROLL
  for (int r = 0; r < 16; ++r) v[r] = _mm512_maskz_loadu_epi8(there, from[r]);
  turn(v);
  MOEFLUX_UNROLL
  for (int g = 0; g < scale_groups; ++g) {
    const Floats scale = half_powers(((Words)v[g / 4] >> (g % 4 * 8)) & 0xffu);
    store(to.scales[g], scale);
    store(to.biases[g], scale * -12.0f);
  }
}

// Loads scales and biases of groups first ... first + count - 1 for matrix rows row ... row + 15. Rows from `last` on
// get those of the row before it.
static void load_scales(const Weights& w, int64_t row, int64_t last, int64_t first, int64_t count, Scales& to) {
  const uint8_t* scales[code_rows];
  const uint8_t* biases[code_rows];
  for (int64_t r = 0; r < code_rows; ++r) {
    const int64_t at = (row + r < last ? row + r : last - 1) * w.scale_stride + first * scale_bytes_of(w.scale_type);
    scales[r] = w.scales + at;
    biases[r] = w.biases + at;
  }
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
