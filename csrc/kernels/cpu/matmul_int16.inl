// Products of digits and codes (see int16.h) with AVX-512 VNNI: 4 products of bytes per lane and instruction.
//
// For one row of x, a vector holds parts of one matrix row's sum. The vectors of sixteen rows are added up together, so
// that each lane becomes a row. For several rows of x, the codes are transposed first, and lanes are rows from the
// start. The scales of a group are transposed in both cases.
#include "kernels/cpu/int16_sums.inl"

namespace moeflux::cpu::MOEFLUX_ISA {

// ---- Sixteen rows of the matrix ------------------------------------------------------------------------------------

MOEFLUX_INLINE Floats floats(__m512i sums) { return (Floats)_mm512_maskz_cvtepi32_ps(all_lanes, sums); }

// total + a group's part of the product: the one place that rounds.
MOEFLUX_INLINE Floats add_group(Floats total, Floats sum, Floats scale, Floats bias, Floats unit, Floats x_sum) {
  return fma(bias, x_sum, fma(sum, scale * unit, total));
}

// total + a block's part, for the groups from `g` on. Those after the last group have units and sums of 0.
template <int64_t group_size>
MOEFLUX_INLINE Floats add_block(Floats total, const BlockSums<group_size>& sums, const Scales& scales,
                                const DigitRow& x, int64_t g) {
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < int16_block / group_size; ++i)
    total = add_group(total, floats(sums[i]), load<Floats>(scales.scales[(g + i) % scale_groups]),
                      load<Floats>(scales.biases[(g + i) % scale_groups]), splat(x.units[g + i]), splat(x.sums[g + i]));
  return total;
}

constexpr int first_cache = 3;  // in the terms of __builtin_prefetch
constexpr int second_cache = 2;

// Prefetches a cache line at an address that may lie after the matrix.
template <int cache = first_cache>
MOEFLUX_INLINE void prefetch_line(const uint8_t* from, int64_t offset) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(from) + offset), 0, cache);
}

constexpr int64_t min_prefetch_distance = 16384;  // bytes of codes between what is prefetched and what is multiplied

// The memory that is prefetched while `together` rows from `row` on are computed: some rows further on, or, after the
// last row, what is read next.
MOEFLUX_INLINE ReadNext prefetch_target(const Weights& w, int64_t row, int64_t last, int64_t together,
                                        const ReadNext& next) {
  // Rows that are all the same (see multiply_few) have no stride.
  const int64_t distance = divide_up(min_prefetch_distance, greater(together * w.code_stride, 1)) * together;
  const auto at = [&](const ReadNext& from, int64_t rows) {
    return ReadNext{from.codes + rows * w.code_stride, from.scales + rows * w.scale_stride,
                    from.biases + rows * w.scale_stride};
  };
  const int64_t to = row + distance;
  return to < last || !next.codes ? at({w.codes, w.scales, w.biases}, to) : at(next, to - last);
}

// And their scales, evenly over the blocks. Those of NVFP4 are more than a line for each, and have no biases.
template <int64_t group_size>
MOEFLUX_INLINE void prefetch_scales(const ReadNext& target, int64_t b, int64_t bytes) {
  if constexpr (group_size == 16) {
    for (int64_t line = 0; line < bytes; line += 64) prefetch_line(target.scales, b * bytes + line);
  } else {
    prefetch_line(target.scales, b * bytes);
    prefetch_line(target.biases, b * bytes);
  }
}

// Of 16 rows' sums, those of the `left` rows that are there.
MOEFLUX_INLINE void store_rows(float* to, Floats sums, int64_t left) {
  if (left >= code_rows)
    store(to, sums);
  else
    store_some(to, sums, left);
}

template <int bits, int64_t group_size>
static void multiply_one_row(const Weights& w, int64_t row, int64_t last, const uint8_t* x, float* out,
                             const ReadNext& next) {
  constexpr int64_t block_bytes = bytes_of_128(bits);  // of one row
  constexpr int64_t block_groups = int16_block / group_size;
  const int64_t groups = w.columns / group_size;
  const int64_t blocks = int16_blocks(w.columns);
  const int64_t scale_step = code_rows * w.scale_stride / blocks;
  const SixteenRows sixteen = sixteen_rows(row, last);
  const ReadNext target = prefetch_target(w, row, last, code_rows, next);
  const DigitRow from = digit_row(x, w.columns, group_size);
  SpacedRows rows = spaced_rows(w.codes + sixteen.first * w.code_stride, w.code_stride);
  // From the last block of a row to the end of the first one in the next sixteen rows. Without a row there, it is still
  // a place that may be prefetched.
  const int64_t to_next_rows = code_rows * w.code_stride - (blocks - 2) * block_bytes - 1;
  Floats total = {};
  Scales scales;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t g = b * block_groups;
    if (g % scale_groups == 0) load_scales<bits>(w, sixteen.first, g, smaller(groups - g, scale_groups), scales);
    prefetch_scales<group_size>(target, b, scale_step);
    const uint8_t* digits = from.digits + b * int16_block_bytes;
    const uint8_t* codes = target.codes + b * code_rows * block_bytes;
    SpacedRows ahead = rows;
    ahead.first += b + 1 < blocks ? 2 * block_bytes - 1 : to_next_rows;
    BlockSums<group_size> sums;
    if (const int64_t left = w.columns - b * int16_block; left >= int16_block)
      sums_of_block<bits, group_size, true>(digits, rows, b % 2, left, codes, ahead, sums);
    else
      sums_of_part<bits, group_size>(digits, rows, b % 2, left, codes, ahead, sums);
    rows.first += block_bytes;
    total = add_block<group_size>(total, sums, scales, from, g);
  }
  store_wanted(sixteen, out, total);
}

// ---- Several rows of x ---------------------------------------------------------------------------------------------
//
// Here a lane is a matrix row from the start. The codes of a block are transposed once for all rows of x, and four
// columns of a row of x go to all lanes. So no lanes are added up, and besides the products only a few instructions per
// group remain.

constexpr int64_t panel_vectors = 2;  // of 16 matrix rows, which take the same columns of x together
constexpr int64_t panel_rows = panel_vectors * code_rows;
constexpr int64_t block_words = int16_block / 8;  // of four even columns or four odd ones
constexpr int64_t rows_together = 8;              // of x: their sums are 16 registers

// A block of 16 matrix rows: lane r of word k has four columns of row r.
struct TurnedCodes {
  __m512i words[2][block_words];  // of even columns, of odd ones
};

// Block b of row r begins at rows[r] + b * bytes_of_128(bits); `left` columns of it are there.
template <int bits>
MOEFLUX_INLINE void turn_codes(const uint8_t* const* rows, int64_t b, int64_t left, TurnedCodes& to) {
  const int64_t offset = b * bytes_of_128(bits);
  __m512i v[code_rows];
  if constexpr (bits == 4 || bits == e2m1) {
    if (left >= int16_block) {  // then there is half as much to transpose
      MOEFLUX_UNROLL
      for (int64_t r = 0; r < code_rows; ++r) v[r] = load<__m512i>(rows[r] + offset);
      turn(v);
      const __m512i low = _mm512_set1_epi8(15);
      MOEFLUX_UNROLL
      for (int64_t k = 0; k < block_words; ++k) {
        to.words[0][k] = _mm512_and_si512(v[k], low);
        to.words[1][k] = _mm512_and_si512(_mm512_maskz_srli_epi32(all_lanes, v[k], 4), low);
        if constexpr (bits == e2m1) {
          to.words[0][k] = raised(to.words[0][k]);
          to.words[1][k] = raised(to.words[1][k]);
        }
      }
      return;
    }
  }
  for (int64_t r = 0; r < code_rows; ++r) {
    const BlockCodes codes = codes_at<bits>(rows[r] + offset, b % 2, left);
    to.words[0][r] = codes.even;
    to.words[1][r] = codes.odd;
  }
  for (auto& words : to.words) {
    MOEFLUX_UNROLL
    for (int64_t r = 0; r < code_rows; ++r) v[r] = words[r];
    turn(v);
    MOEFLUX_UNROLL
    for (int64_t k = 0; k < block_words; ++k) words[k] = v[k];
  }
}

// What is prefetched, evenly over the products of a block: so many lines of memory, and with few rows of x as many of
// the next block of each row of the matrix. That ends at rows[r] + next, and has one line, or two if `two` is 1.
struct Asked {
  const uint8_t* from = nullptr;
  int64_t lines = 0;
  const uint8_t* const* rows = nullptr;  // null: none of these
  int64_t next = 0;
  int64_t two = 0;
};

// total[i][m] + the part of the groups of a block, for `n` rows of x and `vectors` times 16 matrix rows. If there are
// registers enough, both digits are multiplied at once, so that more sums are under way. Then memory is the limit, as
// for one row of x.
template <int64_t group_size, int64_t vectors, int64_t n>
MOEFLUX_INLINE void add_products(const TurnedCodes (&codes)[panel_vectors], const Scales (&scales)[panel_vectors],
                                 const DigitRow* x, int64_t b, const Asked& asked, Floats (*total)[panel_vectors]) {
  constexpr int64_t words = group_size / 8;  // of a group
  constexpr bool few = n * 2 <= rows_together;
  constexpr int64_t together = few ? 2 : 1;  // digits
  constexpr int64_t turns = 2 / together * block_words;
  const int64_t first = b * (int16_block / group_size);
  int64_t turn = 0;
  int64_t line = 0;
  for (int64_t g = 0; g < int16_block / group_size; ++g) {
    __m512i sums[together][n][vectors];
    MOEFLUX_UNROLL
    for (auto& of_digit : sums)
      for (auto& of_row : of_digit)
        for (__m512i& sum : of_row) sum = _mm512_setzero_si512();
    for (int64_t pass = 0; pass < 2 / together; ++pass) {
      const int64_t at = b * int16_block_bytes + pass * int16_block + g * words * 4;
      for (int64_t k = 0; k < words; ++k) {
        for (const int64_t upto = ++turn * asked.lines / turns; line < upto; ++line) {
          if (few && asked.rows) {
            prefetch_line<second_cache>(asked.from, line * 64);
            prefetch_line(asked.rows[line >> asked.two], asked.next - (line & asked.two) * 64);
          } else {
            prefetch_line(asked.from, line * 64);
          }
        }
        MOEFLUX_UNROLL
        for (int64_t parity = 0; parity < 2; ++parity) {
          __m512i of_rows[vectors];
          MOEFLUX_UNROLL
          for (int64_t m = 0; m < vectors; ++m) of_rows[m] = codes[m].words[parity][g * words + k];
          MOEFLUX_UNROLL
          for (int64_t digit = 0; digit < together; ++digit) {
            MOEFLUX_UNROLL
            for (int64_t i = 0; i < n; ++i) {
              int32_t four;
              __builtin_memcpy(&four, x[i].digits + at + digit * int16_block + parity * 64 + k * 4, sizeof four);
              const __m512i everywhere = _mm512_set1_epi32(four);
              MOEFLUX_UNROLL
              for (int64_t m = 0; m < vectors; ++m) sums[digit][i][m] = dot(sums[digit][i][m], of_rows[m], everywhere);
            }
          }
        }
      }
      if (pass == 0) {
        MOEFLUX_UNROLL
        for (auto& of_row : sums[0])
          for (__m512i& sum : of_row) sum = _mm512_maskz_slli_epi32(all_lanes, sum, 8);
      }
    }
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < n; ++i)
      for (int64_t m = 0; m < vectors; ++m) {
        __m512i sum = sums[0][i][m];
        if constexpr (together == 2) sum = _mm512_add_epi32(sum, sums[1][i][m]);
        const int64_t at = (first + g) % scale_groups;
        total[i][m] =
            add_group(total[i][m], floats(sum), load<Floats>(scales[m].scales[at]), load<Floats>(scales[m].biases[at]),
                      splat(x[i].units[first + g]), splat(x[i].sums[first + g]));
      }
  }
}

template <int64_t group_size, int64_t vectors, int64_t max>
static void add_rest(const TurnedCodes (&codes)[panel_vectors], const Scales (&scales)[panel_vectors],
                     const DigitRow* x, int64_t n, int64_t b, const Asked& asked, Floats (*total)[panel_vectors]) {
  if constexpr (max > 0) {
    if (n == max) return add_products<group_size, vectors, max>(codes, scales, x, b, asked, total);
    add_rest<group_size, vectors, max - 1>(codes, scales, x, n, b, asked, total);
  }
}

// `vectors` times 16 rows of the matrix, of which the last 16 are there in part at least.
template <int bits, int64_t group_size, int64_t vectors>
static void multiply_panel(const Weights& w, int64_t row, int64_t last, const uint8_t* const* x, float* const* out,
                           int64_t n, const ReadNext& next) {
  constexpr int64_t block_bytes = bytes_of_128(bits);  // of one row
  constexpr int64_t block_groups = int16_block / group_size;
  const int64_t groups = w.columns / group_size;
  const int64_t blocks = int16_blocks(w.columns);
  const int64_t scale_step = vectors * code_rows * w.scale_stride / blocks;
  const ReadNext target = prefetch_target(w, row, last, vectors * code_rows, next);
  SixteenRows sixteen[vectors];
  const uint8_t* rows[vectors * code_rows];
  for (int64_t m = 0; m < vectors; ++m) {
    sixteen[m] = sixteen_rows(row + m * code_rows, last);
    for (int64_t r = 0; r < code_rows; ++r) rows[m * code_rows + r] = w.codes + (sixteen[m].first + r) * w.code_stride;
  }
  DigitRow from[max_block];
  Floats total[max_block][panel_vectors];
  for (int64_t i = 0; i < n; ++i) {
    from[i] = digit_row(x[i], w.columns, group_size);
    for (Floats& part : total[i]) part = Floats{};
  }
  TurnedCodes codes[panel_vectors];
  Scales scales[panel_vectors];
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t g = b * block_groups;
    for (int64_t m = 0; m < vectors; ++m) {
      if (g % scale_groups == 0)
        load_scales<bits>(w, sixteen[m].first, g, smaller(groups - g, scale_groups), scales[m]);
      turn_codes<bits>(rows + m * code_rows, b, w.columns - b * int16_block, codes[m]);
    }
    prefetch_scales<group_size>(target, b, scale_step);
    Asked asked = {target.codes + b * vectors * code_rows * block_bytes, vectors * code_rows * block_bytes / 64};
    if constexpr (bits == 4 || bits == e2m1 || bits == 8) {  // taking the others apart takes longer than reading them
      asked.rows = rows;
      asked.next = end_of_next_block<bits>(w, b, blocks, vectors * code_rows);
      asked.two = width_of(bits) / 8;
    }
    int64_t i = 0;
    for (; i + rows_together <= n; i += rows_together, asked = {})
      add_products<group_size, vectors, rows_together>(codes, scales, from + i, b, asked, total + i);
    add_rest<group_size, vectors, rows_together - 1>(codes, scales, from + i, n - i, b, asked, total + i);
  }
  for (int64_t i = 0; i < n; ++i)
    for (int64_t m = 0; m < vectors; ++m) store_wanted(sixteen[m], out[i], total[i][m]);
}

template <int bits, int64_t group_size>
static void multiply_groups(const Weights& w, int64_t first, int64_t last, const uint8_t* const* x, float* const* out,
                            int64_t n, const ReadNext& next) {
  if (n == 1) {
    for (; first < last; first += code_rows) multiply_one_row<bits, group_size>(w, first, last, *x, *out, next);
    return;
  }
  for (; last - first > code_rows; first += panel_rows)
    multiply_panel<bits, group_size, panel_vectors>(w, first, last, x, out, n, next);
  if (first < last) multiply_panel<bits, group_size, 1>(w, first, last, x, out, n, next);
}

// For a matrix of fewer than 16 rows: each is computed as 16 that are the same.
template <int bits, int64_t group_size>
MOEFLUX_COLD void multiply_few(const Weights& w, int64_t first, int64_t last, const uint8_t* const* x,
                               float* const* out, int64_t n) {
  float same[max_block][code_rows];
  float* to[max_block];
  for (int64_t i = 0; i < n; ++i) to[i] = same[i];
  Weights one = w;
  one.code_stride = one.scale_stride = 0;
  for (; first < last; ++first) {
    one.codes = w.codes + first * w.code_stride;
    one.scales = w.scales + first * w.scale_stride;
    one.biases = w.biases + first * w.scale_stride;
    multiply_groups<bits, group_size>(one, 0, code_rows, x, to, n, {});
    for (int64_t i = 0; i < n; ++i) out[i][first] = same[i][0];
  }
}

template <int bits, int64_t group_size>
static void multiply_rows(const Weights& w, int64_t first, int64_t last, const uint8_t* const* x, float* const* out,
                          int64_t n, const ReadNext& next) {
  if (last < code_rows) return multiply_few<bits, group_size>(w, first, last, x, out, n);
  multiply_groups<bits, group_size>(w, first, last, x, out, n, next);
}

template <int bits>
static void multiply_codes(const Weights& w, int64_t first, int64_t last, const uint8_t* const* x, float* const* out,
                           int64_t n, const ReadNext& next) {
  if (w.group_size == 32) return multiply_rows<bits, 32>(w, first, last, x, out, n, next);
  if (w.group_size == 64) return multiply_rows<bits, 64>(w, first, last, x, out, n, next);
  return multiply_rows<bits, 128>(w, first, last, x, out, n, next);
}

static void multiply_int16(const Weights& weights, int64_t first, int64_t last, const uint8_t* const* x,
                           float* const* out, int64_t n, const ReadNext& next) {
  switch (weights.block) {
#define MOEFLUX_FOR_BLOCK(type)                                                                                       \
  case BlockType::type:                                                                                               \
    return multiply_rows<codes_in(BlockType::type), block_shape(BlockType::type).group>(weights, first, last, x, out, \
                                                                                        n, next)
    MOEFLUX_FOR_BLOCK(q8_0);
    MOEFLUX_FOR_BLOCK(q4_0);
    MOEFLUX_FOR_BLOCK(q4_1);
    MOEFLUX_FOR_BLOCK(q5_0);
    MOEFLUX_FOR_BLOCK(q5_1);
    MOEFLUX_FOR_BLOCK(q2_k);
    MOEFLUX_FOR_BLOCK(q3_k);
    MOEFLUX_FOR_BLOCK(q4_k);
    MOEFLUX_FOR_BLOCK(q5_k);
    MOEFLUX_FOR_BLOCK(q6_k);
    MOEFLUX_FOR_BLOCK(iq4_nl);
    MOEFLUX_FOR_BLOCK(iq4_xs);
    MOEFLUX_FOR_BLOCK(mxfp4);
#undef MOEFLUX_FOR_BLOCK
    case BlockType::none:
      break;
  }
  switch (weights.bits) {
    case 2:
      return multiply_codes<2>(weights, first, last, x, out, n, next);
    case 3:
      return multiply_codes<3>(weights, first, last, x, out, n, next);
    case 4:
      if (weights.scale_type == DType::u8) return multiply_rows<e2m1, 32>(weights, first, last, x, out, n, next);
      if (weights.scale_type == DType::f8_e4m3) return multiply_rows<e2m1, 16>(weights, first, last, x, out, n, next);
      return multiply_codes<4>(weights, first, last, x, out, n, next);
    case 5:
      return multiply_codes<5>(weights, first, last, x, out, n, next);
    case 6:
      return multiply_codes<6>(weights, first, last, x, out, n, next);
    default:
      return multiply_codes<8>(weights, first, last, x, out, n, next);
  }
}

constexpr Int16Kernels int16_kernels{convert_to_int16, multiply_int16};

}  // namespace moeflux::cpu::MOEFLUX_ISA
