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

MOEFLUX_INLINE Floats floats(__m512i sums) { return (Floats)_mm512_maskz_cvtepi32_ps(all_lanes, sums); }

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

// How the scales of eight groups of 16 rows are kept. With one row of x, numbers are made of them where they are used,
// because a vector takes longer to be stored than to be made. Several rows of x share them as f32.
enum class ScaleForm { floats, powers, e4m3, halves, six_bits };

template <int bits, int64_t group_size>
constexpr ScaleForm scale_form = [] {
  if (bits == e2m1) return group_size == 16 ? ScaleForm::e4m3 : ScaleForm::powers;
  if (!are_in_blocks(bits)) return ScaleForm::floats;
  const BlockShape& shape = block_shape(block_type_of(bits));
  if (shape.type == BlockType::q4_k || shape.type == BlockType::q5_k) return ScaleForm::six_bits;
  return shape.type == BlockType::q4_1 || shape.type == BlockType::q5_1 ? ScaleForm::halves : ScaleForm::floats;
}();

struct Scales {
  alignas(64) float scales[scale_groups][code_rows];
  alignas(64) float biases[scale_groups][code_rows];  // where the codes do not tell them
  alignas(64) float of_rows[code_rows];               // of `six_bits`: the blocks' scales
  alignas(64) float minima_of_rows[code_rows];        // of `six_bits`
  __m512i words[4];         // of `powers`, `e4m3` and `six_bits`: a lane has the bytes of four groups of a row
  __m512i minima_words[2];  // of `six_bits`
  alignas(32) uint16_t halves[2][scale_groups][code_rows];  // scales and biases
};

// What is added to codes to make them 0 or more. Such groups have no biases.
template <int bits>
constexpr int raise_of = [] {
  if (bits == e2m1) return 12;
  return are_in_blocks(bits) ? raised_of(block_type_of(bits)) : 0;
}();

// One byte of each lane, as a number of 32 bits.
MOEFLUX_INLINE Words byte_of(__m512i words, int which) { return ((Words)words >> (which * 8)) & 0xffu; }

// Byte `which` of each lane, moved to where an f32 has its exponent.
MOEFLUX_INLINE Words exponent_of(__m512i words, int which) {
  const Words moved = which == 3 ? (Words)words >> 1 : (Words)words << (23 - which * 8);
  return moved & 0x7f800000u;
}

// 256ths of numbers E4M3, which are byte `which` of each lane. Their bits are those of an f32 that is 2^120 times less.
MOEFLUX_INLINE Floats e4m3_256th(__m512i words, int which) {
  const Words upper = (Words)words << (24 - which * 8);
  return (Floats)((Words)((Ints)upper >> 4) & 0x87f00000u) * 0x1p112f;
}

// The scales of group `at`, whose byte in a lane is `which`. Those of MXFP4 are halved, those of NVFP4 are 256ths.
template <int bits, int64_t group_size>
MOEFLUX_INLINE Floats scale_at(const Scales& from, int64_t at, int which) {
  constexpr ScaleForm form = scale_form<bits, group_size>;
  if constexpr (form == ScaleForm::powers) {
    return half_power(exponent_of(from.words[at / 4], which));
  } else if constexpr (form == ScaleForm::e4m3) {
    return e4m3_256th(from.words[at / 4], which);
  } else if constexpr (form == ScaleForm::halves) {
    return from_f16(load<Halves>(from.halves[0][at]));
  } else if constexpr (form == ScaleForm::six_bits) {
    return floats((__m512i)byte_of(from.words[at / 4], which)) * load<Floats>(from.of_rows);
  } else {
    return load<Floats>(from.scales[at]);
  }
}

template <int bits, int64_t group_size>
MOEFLUX_INLINE Floats bias_at(const Scales& from, int64_t at, int which) {
  constexpr ScaleForm form = scale_form<bits, group_size>;
  if constexpr (form == ScaleForm::halves)
    return from_f16(load<Halves>(from.halves[1][at]));
  else if constexpr (form == ScaleForm::six_bits)
    return floats((__m512i)byte_of(from.minima_words[at / 4], which)) * load<Floats>(from.minima_of_rows);
  else
    return load<Floats>(from.biases[at]);
}

// Makes all of them, for whoever loads them again and again.
template <int bits, int64_t group_size>
MOEFLUX_INLINE void make_scales(Scales& scales) {
  MOEFLUX_UNROLL
  for (int g = 0; g < scale_groups; ++g) {
    const Floats scale = scale_at<bits, group_size>(scales, g, g % 4);
    if constexpr (raise_of<bits> == 0) store(scales.biases[g], bias_at<bits, group_size>(scales, g, g % 4));
    store(scales.scales[g], scale);
  }
}

// Eight bytes of each of eight rows from row `r` on.
MOEFLUX_INLINE __m512i eight_rows(const SpacedRows& rows, int64_t r) {
  const auto two = [&](int64_t i) __attribute__((always_inline)) {
    typedef uint64_t Two __attribute__((vector_size(16)));
    return (__m128i)Two{load<uint64_t>(rows.row(r + i)), load<uint64_t>(rows.row(r + i + 1))};
  };
  __m512i all = _mm512_zextsi128_si512(two(0));
  all = _mm512_mask_broadcast_i32x4(all, 0x00f0, two(2));
  all = _mm512_mask_broadcast_i32x4(all, 0x0f00, two(4));
  return _mm512_mask_broadcast_i32x4(all, 0xf000, two(6));
}

// Eight bytes of each of 16 rows: lane r of the first vector has four of row r, of the second the other four.
MOEFLUX_INLINE void turn_eight_bytes(const SpacedRows& rows, __m512i (&lane)[2]) {
  const Words a = (Words)eight_rows(rows, 0);
  const Words b = (Words)eight_rows(rows, 8);
  lane[0] = (__m512i)evens(a, b);
  lane[1] = (__m512i)odds(a, b);
}

// Scales of one byte, of up to 8 groups.
MOEFLUX_INLINE void turn_bytes(const SpacedRows& rows, int64_t count, Scales& to) {
  if (count == scale_groups) {
    __m512i lane[2];
    turn_eight_bytes(rows, lane);
    to.words[0] = lane[0];
    to.words[1] = lane[1];
  } else {
    turn_quarter_rows(rows, count, to.words);
  }
}

// Scales of MXFP4, and those of NVFP4's groups.
static void turn_floats(const Weights& w, int64_t row, int64_t first, int64_t count, Scales& to) {
  const uint8_t* from = w.scales + row * w.scale_stride + w.row_scale_bytes + first;
  turn_bytes(spaced_rows(from, w.scale_stride), count, to);
}

// Those of 16 rows of NVFP4, with which rows of scales begin.
MOEFLUX_INLINE Floats scales_of_rows(const Weights& w, int64_t row) {
  if (w.row_scale_bytes == 0) return splat(1.0f);
  alignas(64) float scales[code_rows];
  for (int64_t r = 0; r < code_rows; ++r) scales[r] = load<float>(w.scales + (row + r) * w.scale_stride);
  return load<Floats>(scales);
}

// ---- Scales of blocks ----------------------------------------------------------------------------------------------

// A number of each of `count` blocks of 16 rows, `offset` bytes behind the start of the block. Those of four rows are
// put together in a register and stored at once.
template <typename Number, bool whole>
MOEFLUX_INLINE void copy_numbers(const SpacedRows& rows, int64_t apart, int64_t offset, int64_t count,
                                 Number (&to)[scale_groups][code_rows]) {
  using Four = std::conditional_t<sizeof(Number) == 1, uint32_t, uint64_t>;
  MOEFLUX_UNROLL
  for (int64_t r = 0; r < code_rows; r += 4) {
    MOEFLUX_UNROLL
    for (int64_t g = 0; g < scale_groups; ++g) {
      Four four = 0;
      MOEFLUX_UNROLL
      for (int64_t i = 3; i >= 0; --i) {
        const Number number = whole || g < count ? load<Number>(rows.row(r + i) + offset + g * apart) : 0;
        four = four << (8 * sizeof number) | number;
        asm("" : "+r"(four));  // otherwise they are put together in vectors, whose units have enough to do
      }
      store(&to[g][r], four);
    }
  }
}

// Blocks of 32 columns, each of one group.
template <BlockType type, bool whole>
static void load_small_blocks(const SpacedRows& rows, int64_t count, Scales& to) {
  constexpr int64_t bytes = block_shape(type).bytes;
  if constexpr (type == BlockType::mxfp4) {
    alignas(64) uint8_t exponents[scale_groups][code_rows];
    copy_numbers<uint8_t, whole>(rows, bytes, 0, count, exponents);
    MOEFLUX_UNROLL
    for (int64_t g = 0; g < scale_groups; ++g) {
      const Words e = (Words)load_bytes(exponents[g]);
      const Words bits = e < 2 ? (Words{} + 0x00200000u) << e : (e - 1) << 23;
      store(to.scales[g], bits);
    }
  } else {
    copy_numbers<uint16_t, whole>(rows, bytes, 0, count, to.halves[0]);
    if constexpr (scale_form<codes_in(type), 32> == ScaleForm::halves) {
      copy_numbers<uint16_t, whole>(rows, bytes, 2, count, to.halves[1]);
    } else {
      MOEFLUX_UNROLL
      for (int64_t g = 0; g < scale_groups; ++g) store(to.scales[g], from_f16(load<Halves>(to.halves[0][g])));
    }
  }
}

// Q4_K and Q5_K, whose blocks begin with 16 bytes of scales and minima: see scales_of_6_bits.
static void load_scales_of_6_bits(const SpacedRows& rows, Scales& to) {
  __m512i lane[4];
  turn_quarter_rows<true>(rows, 0xffff, lane);
  store(to.of_rows, from_f16(narrow((Words)lane[0] & 0xffffu)));
  store(to.minima_of_rows, -from_f16(narrow((Words)lane[0] >> 16)));
  const auto first = [](__m512i words) { return (__m512i)((Words)words & 0x3f3f3f3fu); };
  const auto last = [&](Words low, __m512i words) {
    return (__m512i)((low & 0x0f0f0f0fu) | (((Words)words >> 2) & 0x30303030u));
  };
  to.words[0] = first(lane[1]);
  to.words[1] = last((Words)lane[3], lane[1]);
  to.minima_words[0] = first(lane[2]);
  to.minima_words[1] = last((Words)lane[3] >> 4, lane[2]);
}

// Q6_K: eight scales of signed bytes, of one half of a block, and the scale of the block.
static void load_scales_of_q6_k(const SpacedRows& rows, int64_t half, Scales& to) {
  __m512i lane[2];
  SpacedRows at = rows;
  at.first += 192 + half * 8;
  turn_eight_bytes(at, lane);
  alignas(64) uint16_t numbers[code_rows];
  MOEFLUX_UNROLL
  for (int64_t r = 0; r < code_rows; ++r) {
    uint32_t number = load<uint16_t>(rows.row(r) + 208);
    asm("" : "+r"(number));  // see copy_numbers
    numbers[r] = static_cast<uint16_t>(number);
  }
  const Floats scale = from_f16(load<Halves>(numbers));
  MOEFLUX_UNROLL
  for (int g = 0; g < scale_groups; ++g) {
    const Ints number = (Ints)((Words)lane[g / 4] << (24 - g % 4 * 8)) >> 24;
    store(to.scales[g], floats((__m512i)number) * scale);
  }
}

// A row's eight scales and eight biases are one vector, and so are sixteen rows' of a group.
template <BlockType type, bool whole>
static void load_block_scales(const Weights& w, int64_t row, int64_t first, int64_t count, Scales& to) {
  constexpr BlockShape shape = block_shape(type);
  const SpacedRows rows =
      spaced_rows(w.codes + row * w.code_stride + first * shape.group / shape.columns * shape.bytes, w.code_stride);
  if constexpr (shape.columns == 32) {
    load_small_blocks<type, whole>(rows, count, to);
  } else if constexpr (type == BlockType::q4_k || type == BlockType::q5_k) {
    load_scales_of_6_bits(rows, to);
  } else if constexpr (type == BlockType::q6_k) {
    load_scales_of_q6_k(rows, first / scale_groups % 2, to);
  } else {
    __m512i v[code_rows];
    MOEFLUX_UNROLL
    for (int64_t r = 0; r < code_rows; ++r)
      v[r] = (__m512i)row_scales<type>(w.codes + (row + r) * w.code_stride, first);
    turn(v);
    MOEFLUX_UNROLL
    for (int64_t g = 0; g < scale_groups; ++g) {
      store(to.scales[g], v[g]);
      if constexpr (raise_of<codes_in(type)> == 0) store(to.biases[g], v[scale_groups + g]);
    }
  }
}

// Scales and biases of affine groups.
template <DType type>
MOEFLUX_INLINE void turn_both(const SpacedRows& scales, const SpacedRows& biases, int64_t count, Scales& to) {
  turn_scales<type>(scales, count, to.scales);
  turn_scales<type>(biases, count, to.biases);
}

// Loads scales and biases of groups first ... first + count - 1 for matrix rows row ... row + 15.
template <int bits, int64_t group_size>
static void load_scales(const Weights& w, int64_t row, int64_t first, int64_t count, Scales& to) {
  if constexpr (are_in_blocks(bits)) {
    constexpr BlockType type = block_type_of(bits);
    if (block_shape(type).columns == 256 || count == scale_groups)
      return load_block_scales<type, true>(w, row, first, count, to);
    return load_block_scales<type, false>(w, row, first, count, to);
  } else {
    if constexpr (bits == e2m1) {
      turn_floats(w, row, first, count, to);
    } else {
      const int64_t at = row * w.scale_stride + first * scale_bytes_of(w.scale_type);
      const SpacedRows scales = spaced_rows(w.scales + at, w.scale_stride);
      const SpacedRows biases = spaced_rows(w.biases + at, w.scale_stride);
      if (w.scale_type == DType::bf16) return turn_both<DType::bf16>(scales, biases, count, to);
      if (w.scale_type == DType::f16) return turn_both<DType::f16>(scales, biases, count, to);
      turn_both<DType::f32>(scales, biases, count, to);
    }
  }
}

// ---- What products are made of -------------------------------------------------------------------------------------
// With VNNI and without it.

// The largest code, as it is multiplied.
template <int bits>
constexpr int largest_code = [] {
  if (bits == e2m1) return 24;
  if (!are_in_blocks(bits)) return (1 << bits) - 1;
  const BlockType type = block_type_of(bits);
  if (type == BlockType::mxfp4) return 24;
  return raised_of(type) == 128 ? 255 : (1 << width_of(bits)) - 1;
}();

// Sums of neighbouring lanes. Each quarter has two of a, and then two of b.
MOEFLUX_INLINE __m512i sums_of_neighbours(__m512i a, __m512i b) {
  const __m512 first = (__m512)a;
  const __m512 second = (__m512)b;
  return _mm512_add_epi32((__m512i)_mm512_maskz_shuffle_ps(all_lanes, first, second, 0x88),
                          (__m512i)_mm512_maskz_shuffle_ps(all_lanes, first, second, 0xdd));
}

// One digit of the columns of a block, in the order of its codes. Rows share what it takes to make another order.
template <Order order>
MOEFLUX_INLINE BlockCodes digits_of_block(const uint8_t* digits) {
  const __m512i even = load<__m512i>(digits);
  const __m512i odd = load<__m512i>(digits + 64);
  if constexpr (order == Order::parity) return {even, odd};
  constexpr __mmask64 all_bytes = ~__mmask64{0};
  const __m512i first = _mm512_maskz_unpacklo_epi8(all_bytes, even, odd);
  const __m512i last = _mm512_maskz_unpackhi_epi8(all_bytes, even, odd);
  if constexpr (order == Order::halves) return {first, last};
  const __m512i at = _mm512_setr_epi64(0, 2, 8, 10, 4, 6, 12, 14);
  return {_mm512_maskz_permutex2var_epi64(0xff, first, at, last),
          _mm512_maskz_permutex2var_epi64(0xff, first, _mm512_add_epi64(at, _mm512_set1_epi64(1)), last)};
}

}  // namespace moeflux::cpu::MOEFLUX_ISA
