// Products of digits and codes, see digits.h, for several rows of x: AMX. A tile of codes, 16 matrix rows of 64
// columns, times a tile of digits, the same columns of 16 rows of x, adds 16 x 16 whole numbers to a third. The few
// vector instructions for each of those cost as much as the tiles do, so the tiles of the next group are multiplied
// meanwhile.
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/matmul_digits.inl"
#include "kernels/cpu/tiles.h"

namespace moeflux::cpu::MOEFLUX_ISA {

// ---- Panels --------------------------------------------------------------------------------------------------------

constexpr int64_t least_tile_rows = 3;  // fewer rows of x are faster without tiles
constexpr int64_t tile_columns = 64;    // of codes and digits, or twice 32
constexpr int64_t span_columns = 256;   // packed at once: with more, they leave the first cache
constexpr int64_t span_tiles = span_columns / tile_columns;
constexpr int64_t span_groups = span_columns / 32;
static_assert(span_groups <= lanes && span_columns % digit_block == 0);
constexpr int64_t pass_rows = 512;  // of the matrix, for which rows of x are packed once
constexpr int64_t x_tiles = max_block / tile_rows;

// Some columns of 16 rows of x: a lane is a row. The high digits of a tile, then the low.
struct DigitSpan {
  alignas(64) uint8_t digits[span_tiles][2][tile_bytes];
  alignas(64) float units[span_groups][tile_rows];
  alignas(64) float sums[span_groups][tile_rows];
};

// The same columns of 16 rows of the matrix.
struct CodeSpan {
  alignas(64) uint8_t codes[span_tiles][tile_rows][tile_columns];
  alignas(64) float scales[tile_rows][lanes];  // span_groups of them count
  alignas(64) float biases[tile_rows][lanes];
};

// In a tile stand the even columns, then the odd ones: of its two stretches together, or, where each is a group, of the
// first and then of the second.
template <int64_t group_size>
static void pack_digits(const uint8_t* const* x, int64_t n, int64_t columns, int64_t column, int64_t blocks,
                        DigitSpan& to) {
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t at = (column / digit_block + b) * digit_block_bytes;
    for (int64_t part = 0; part < 4; ++part) {
      __m512i v[16];
      MOEFLUX_UNROLL
      for (int64_t i = 0; i < 16; ++i) v[i] = i < n ? load<__m512i>(x[i] + at + part * 64) : _mm512_setzero_si512();
      turn(v);
      const int64_t digit = part / 2;
      const int64_t odd = part % 2;
      MOEFLUX_UNROLL
      for (int64_t i = 0; i < 16; ++i) {
        const int64_t row = group_size == 32 ? i % 8 / 4 * 8 + odd * 4 + i % 4 : odd * 8 + i % 8;
        store(to.digits[2 * b + i / 8][digit] + row * 64, v[i]);
      }
    }
  }
  const int64_t first = column / group_size;
  const int64_t groups = blocks * digit_block / group_size;
  for (int64_t i = 0; i < tile_rows; ++i) {
    const DigitRow row = digit_row(x[i < n ? i : 0], columns, group_size);
    for (int64_t g = 0; g < groups; ++g) {
      to.units[g][i] = i < n ? row.units[first + g] : 0;
      to.sums[g][i] = i < n ? row.sums[first + g] : 0;
    }
  }
}

// `count` <= span_groups numbers as f32, zeros behind them.
MOEFLUX_INLINE void widen_some(DType type, const uint8_t* from, int64_t count, float (&to)[lanes]) {
  const auto there = static_cast<__mmask16>((1u << count) - 1);
  if (type == DType::f32) return store(to, _mm512_maskz_loadu_ps(there, from));
  const Halves halves = (Halves)_mm256_maskz_loadu_epi16(there, from);
  store(to, type == DType::bf16 ? from_bf16(halves) : from_f16(halves));
}

// Where codes are unpacked next: 16 rows of the matrix, from a column on.
struct SpanPlace {
  int64_t row;
  int64_t column;
};

// Asks for what is unpacked next meanwhile.
template <int bits, int64_t group_size>
static void unpack_span(const Weights& w, int64_t row, int64_t last, int64_t column, int64_t blocks, SpanPlace next,
                        CodeSpan& to) {
  const int64_t scale_bytes = w.scale_type == DType::f32 ? 4 : 2;
  const int64_t first = column / group_size;
  const int64_t groups = smaller(w.columns / group_size - first, blocks * digit_block / group_size);
  for (int64_t r = 0; r < tile_rows; ++r) {
    const int64_t from_row = smaller(row + r, last - 1);
    const uint8_t* from = w.codes + from_row * w.code_stride + column * bits / 8;
    for (int64_t b = 0; b < blocks; ++b, from += digit_block * bits / 8) {
      const BlockCodes codes = codes_of<bits>(from, w.columns - column - b * digit_block);
      __m512i first_tile = quarters<0x44>(codes.even, codes.odd);
      __m512i second_tile = quarters<0xee>(codes.even, codes.odd);
      if constexpr (group_size == 32) {
        first_tile = quarters<0xd8>(first_tile, first_tile);
        second_tile = quarters<0xd8>(second_tile, second_tile);
      }
      store(to.codes[2 * b][r], first_tile);
      store(to.codes[2 * b + 1][r], second_tile);
    }
    const int64_t next_codes = (next.row + r) * w.code_stride + next.column * bits / 8;
    MOEFLUX_UNROLL
    for (int64_t line = 0; line < span_columns * bits / 8; line += 64) prefetch_line(w.codes, next_codes + line);
    const int64_t next_scales = (next.row + r) * w.scale_stride + next.column / group_size * scale_bytes;
    prefetch_line(w.scales, next_scales);
    prefetch_line(w.biases, next_scales);
    const int64_t at = from_row * w.scale_stride + first * scale_bytes;
    widen_some(w.scale_type, w.scales + at, groups, to.scales[r]);
    widen_some(w.scale_type, w.biases + at, groups, to.biases[r]);
  }
}

// ---- 16 rows by 16 -------------------------------------------------------------------------------------------------

// The sums of a group, one for each digit.
struct TileSums {
  alignas(64) int32_t high[tile_rows][tile_rows];
  alignas(64) int32_t low[tile_rows][tile_rows];
};

// Group `g` of the span: tiles 2 * set and 2 * set + 1 are its sums.
template <int64_t group_size, int set>
MOEFLUX_INLINE void dot_group(const CodeSpan& codes, const DigitSpan& x, int64_t g, TileSums& sums) {
  zero_tile<2 * set>();
  zero_tile<2 * set + 1>();
  constexpr int64_t tiles = group_size == 128 ? 2 : 1;
  constexpr int64_t parts = group_size == 32 ? 2 : 1;  // groups a tile
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t t = g * tiles / parts + i;
    const int64_t part = g % parts;
    load_tile<6>(codes.codes[t][0] + part * 32, tile_columns);
    load_tile<7>(x.digits[t][0] + part * 512, 64);
    dot_tiles<2 * set, 6, 7>();
    load_tile<7>(x.digits[t][1] + part * 512, 64);
    dot_tiles<2 * set + 1, 6, 7>();
  }
  store_tile<2 * set>(sums.high, 64);
  store_tile<2 * set + 1>(sums.low, 64);
}

// As `add_group` of one row, where a lane is a row of the matrix: here it is a row of x.
MOEFLUX_INLINE void add_sums(const TileSums& sums, const CodeSpan& codes, const DigitSpan& x, int64_t g,
                             Floats (&total)[tile_rows]) {
  const Floats unit = load<Floats>(x.units[g]);
  const Floats x_sum = load<Floats>(x.sums[g]);
  MOEFLUX_UNROLL
  for (int64_t r = 0; r < tile_rows; ++r) {
    const __m512i high = _mm512_maskz_slli_epi32(all_lanes, load<__m512i>(sums.high[r]), 8);
    const __m512i sum = _mm512_add_epi32(high, load<__m512i>(sums.low[r]));
    total[r] = add_group(total[r], floats(sum), splat(codes.scales[r][g]), splat(codes.biases[r][g]), unit, x_sum);
  }
}

// to += the product over the span's groups.
template <int64_t group_size>
static void add_span(const CodeSpan& codes, const DigitSpan& x, int64_t groups, float (&to)[tile_rows][tile_rows]) {
  Floats total[tile_rows];
  MOEFLUX_UNROLL
  for (int64_t r = 0; r < tile_rows; ++r) total[r] = load<Floats>(to[r]);
  TileSums even;
  TileSums odd;
  dot_group<group_size, 0>(codes, x, 0, even);
  for (int64_t g = 0; g < groups; g += 2) {
    if (g + 1 < groups) dot_group<group_size, 1>(codes, x, g + 1, odd);
    add_sums(even, codes, x, g, total);
    if (g + 1 == groups) break;
    if (g + 2 < groups) dot_group<group_size, 0>(codes, x, g + 2, even);
    add_sums(odd, codes, x, g + 1, total);
  }
  MOEFLUX_UNROLL
  for (int64_t r = 0; r < tile_rows; ++r) store(to[r], total[r]);
}

// ---- Whole products ------------------------------------------------------------------------------------------------

struct TileRoom {
  DigitSpan x[x_tiles];
  CodeSpan codes;
  alignas(64) float totals[pass_rows / tile_rows][x_tiles][tile_rows][tile_rows];
};

template <int bits, int64_t group_size>
static void multiply_pass(const Weights& w, int64_t first, int64_t last, const uint8_t* const* x, float* const* out,
                          int64_t n, TileRoom& room) {
  const int64_t panels = divide_up(last - first, tile_rows);
  const int64_t tiles = divide_up(n, tile_rows);
  for (int64_t p = 0; p < panels; ++p)
    __builtin_memset(room.totals[p], 0, static_cast<size_t>(tiles) * sizeof room.totals[p][0]);
  for (int64_t column = 0; column < w.columns; column += span_columns) {
    const int64_t columns = smaller(w.columns - column, span_columns);
    const int64_t blocks = digit_blocks(columns);
    for (int64_t t = 0; t < tiles; ++t)
      pack_digits<group_size>(x + t * tile_rows, smaller(n - t * tile_rows, tile_rows), w.columns, column, blocks,
                              room.x[t]);
    for (int64_t p = 0; p < panels; ++p) {
      const SpanPlace next =
          p + 1 < panels ? SpanPlace{first + (p + 1) * tile_rows, column} : SpanPlace{first, column + span_columns};
      unpack_span<bits, group_size>(w, first + p * tile_rows, last, column, blocks, next, room.codes);
      for (int64_t t = 0; t < tiles; ++t)
        add_span<group_size>(room.codes, room.x[t], columns / group_size, room.totals[p][t]);
    }
  }
  for (int64_t p = 0; p < panels; ++p) {
    const int64_t row = first + p * tile_rows;
    for (int64_t t = 0; t < tiles; ++t) {
      __m512i v[16];
      MOEFLUX_UNROLL
      for (int64_t r = 0; r < 16; ++r) v[r] = load<__m512i>(room.totals[p][t][r]);
      turn(v);
      for (int64_t i = 0; i < smaller(n - t * tile_rows, tile_rows); ++i) {
        float* to = out[t * tile_rows + i] + row;
        if (last - row >= tile_rows)
          store(to, v[i]);
        else
          store_some(to, (Floats)v[i], last - row);
      }
    }
  }
}

template <int bits, int64_t group_size>
static void multiply_tiles(const Weights& w, int64_t first, int64_t last, const uint8_t* const* x, float* const* out,
                           int64_t n) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.row_bytes[tile] = 64;
    shapes.rows[tile] = tile_rows;
  }
  if (group_size == 32) {
    shapes.row_bytes[6] = 32;
    shapes.rows[7] = 8;
  }
  shape_tiles(shapes);
  TileRoom room;
  for (; first < last; first += pass_rows)
    multiply_pass<bits, group_size>(w, first, smaller(first + pass_rows, last), x, out, n, room);
  release_tiles();
}

template <int bits>
static void multiply_tiles_of(const Weights& w, int64_t first, int64_t last, const uint8_t* const* x, float* const* out,
                              int64_t n) {
  if (w.group_size == 32) return multiply_tiles<bits, 32>(w, first, last, x, out, n);
  if (w.group_size == 64) return multiply_tiles<bits, 64>(w, first, last, x, out, n);
  return multiply_tiles<bits, 128>(w, first, last, x, out, n);
}

static void multiply_digits_or_tiles(const Weights& weights, int64_t first, int64_t last, const uint8_t* const* x,
                                     float* const* out, int64_t n, const ReadNext& next) {
  if (n < least_tile_rows) return multiply_digits(weights, first, last, x, out, n, next);
  switch (weights.bits) {
    case 2:
      return multiply_tiles_of<2>(weights, first, last, x, out, n);
    case 3:
      return multiply_tiles_of<3>(weights, first, last, x, out, n);
    case 4:
      return multiply_tiles_of<4>(weights, first, last, x, out, n);
    case 5:
      return multiply_tiles_of<5>(weights, first, last, x, out, n);
    case 6:
      return multiply_tiles_of<6>(weights, first, last, x, out, n);
    default:
      return multiply_tiles_of<8>(weights, first, last, x, out, n);
  }
}

constexpr DigitKernels tile_kernels{convert_to_digits, multiply_digits_or_tiles};

}  // namespace moeflux::cpu::MOEFLUX_ISA
