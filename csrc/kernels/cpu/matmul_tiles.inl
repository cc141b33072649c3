// Products of digits and codes (see int16.h) for several rows of x, with AMX. A tile of codes has 16 matrix rows of 64
// columns. A tile of digits has the same columns of 16 rows of x. Their product adds 16 x 16 whole numbers to a third
// tile. The few vector instructions for each of these numbers cost as much as the tiles do. So the tiles of the next
// group are multiplied meanwhile.
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/matmul_int16.inl"
#include "kernels/cpu/tile_instructions.h"

namespace moeflux::cpu::MOEFLUX_ISA {

// ---- Panels --------------------------------------------------------------------------------------------------------

constexpr int64_t min_tile_rows = 6;      // fewer rows of x are faster without tiles
constexpr int64_t tile_columns = 64;      // of codes and of digits; with groups of 32, twice 32
constexpr int64_t chunk_columns = 256;    // unpacked at once: they stay in the first-level cache
constexpr int64_t packed_columns = 8192;  // of 16 rows of x, packed at once: they stay in the second-level cache
constexpr int64_t panels_together = 2;    // of 16 matrix rows, for one load of x into the first-level cache
constexpr int64_t pass_rows = 512;        // of the matrix, for one packing of the rows of x
constexpr int64_t x_tiles = max_block / tile_rows;
constexpr int64_t min_group = 32;
static_assert(chunk_columns % int16_block == 0 && packed_columns / x_tiles % chunk_columns == 0);

// 64 columns of 16 rows of x: the high digits, and the low ones.
using DigitTile = uint8_t[2][tile_bytes];

// Units and sums of one group in 16 rows of x: a lane is a row.
struct DigitScales {
  float units[tile_rows];
  float sums[tile_rows];
  int32_t whole_sums[tile_rows];
};

// Some columns of 16 rows of x.
struct DigitPanel {
  DigitTile* tiles;
  DigitScales* scales;
};

// A chunk of 16 rows of the matrix.
struct CodeChunk {
  alignas(64) uint8_t codes[chunk_columns / tile_columns][tile_rows][tile_columns];
};

// Scales of 16 rows of the matrix. Rows are a cache line further apart than necessary, so that they do not all share
// one set of the cache.
struct PanelScales {
  alignas(64) float scales[tile_rows][packed_columns / min_group + lanes];
  alignas(64) float biases[tile_rows][packed_columns / min_group + lanes];
};

// A tile has the even columns and then the odd ones of its two stretches together. If each stretch is a group, it has
// those of the first stretch and then those of the second.
template <int64_t group_size>
static void pack_digits(const uint8_t* const* x, int64_t n, int64_t columns, int64_t column, int64_t blocks,
                        const DigitPanel& to) {
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t at = (column / int16_block + b) * int16_block_bytes;
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
        store(to.tiles[2 * b + i / 8][digit] + row * 64, v[i]);
      }
    }
  }
  const int64_t first = column / group_size;
  const int64_t groups = blocks * int16_block / group_size;
  for (int64_t i = 0; i < tile_rows; ++i) {
    const DigitRow row = digit_row(x[i < n ? i : 0], columns, group_size);
    for (int64_t g = 0; g < groups; ++g) {
      to.scales[g].units[i] = i < n ? row.units[first + g] : 0;
      to.scales[g].sums[i] = i < n ? row.sums[first + g] : 0;
      to.scales[g].whole_sums[i] = i < n ? row.whole_sums[first + g] : 0;
    }
  }
}

// `count` numbers as f32, followed by up to 15 zeros. Prefetches those that lie `distance` bytes further on.
MOEFLUX_INLINE void widen(DType type, const uint8_t* from, int64_t count, int64_t distance, float* to) {
  const int64_t size = type == DType::f32 ? 4 : 2;
  for (int64_t i = 0; i < count; i += lanes) {
    const auto there = static_cast<__mmask16>(count - i < lanes ? (1u << (count - i)) - 1 : 0xffff);
    prefetch_line(from, distance + i * size);
    if (type == DType::f32) {
      store(to + i, _mm512_maskz_loadu_ps(there, from + i * size));
    } else {
      const Halves halves = (Halves)_mm256_maskz_loadu_epi16(there, from + i * size);
      store(to + i, type == DType::bf16 ? from_bf16(halves) : from_f16(halves));
    }
  }
}

// The same for scales of MXFP4, which are halved.
MOEFLUX_INLINE void widen_powers(const uint8_t* from, int64_t count, int64_t distance, float* scales) {
  for (int64_t i = 0; i < count; i += lanes) {
    const auto there = static_cast<__mmask16>(count - i < lanes ? (1u << (count - i)) - 1 : 0xffff);
    prefetch_line(from, distance + i);
    store(scales + i, half_powers((Words)_mm512_maskz_cvtepu8_epi32(all_lanes, _mm_maskz_loadu_epi8(there, from + i))));
  }
}

// Widens the scales of `groups` groups from `first` on, in 16 rows of the matrix.
static void widen_scales(const Weights& w, int64_t row, int64_t last, int64_t first, int64_t groups, PanelScales& to) {
  const int64_t distance = panels_together * tile_rows * w.scale_stride;
  for (int64_t r = 0; r < tile_rows; ++r) {
    const int64_t at = smaller(row + r, last - 1) * w.scale_stride + first * scale_bytes_of(w.scale_type);
    if (w.scale_type == DType::u8) {
      widen_powers(w.scales + at, groups, distance, to.scales[r]);
      continue;
    }
    widen(w.scale_type, w.scales + at, groups, distance, to.scales[r]);
    widen(w.scale_type, w.biases + at, groups, distance, to.biases[r]);
  }
}

template <int bits, int64_t group_size>
static void unpack_chunk(const Weights& w, int64_t row, int64_t last, int64_t column, int64_t blocks, CodeChunk& to) {
  for (int64_t r = 0; r < tile_rows; ++r) {
    const uint8_t* from = w.codes + smaller(row + r, last - 1) * w.code_stride + column * width_of(bits) / 8;
    for (int64_t b = 0; b < blocks; ++b, from += int16_block * width_of(bits) / 8) {
      const BlockCodes codes = codes_of<bits>(from, w.columns - column - b * int16_block);
      __m512i first_tile = quarters<0x44>(codes.even, codes.odd);
      __m512i second_tile = quarters<0xee>(codes.even, codes.odd);
      if constexpr (group_size == 32) {
        first_tile = quarters<0xd8>(first_tile, first_tile);
        second_tile = quarters<0xd8>(second_tile, second_tile);
      }
      store(to.codes[2 * b][r], first_tile);
      store(to.codes[2 * b + 1][r], second_tile);
    }
  }
}

// ---- 16 rows by 16 -------------------------------------------------------------------------------------------------

// The sums of a group, one for each digit.
struct TileSums {
  alignas(64) int32_t high[tile_rows][tile_rows];
  alignas(64) int32_t low[tile_rows][tile_rows];
};

// Group `g` of the chunk: tiles 2 * set and 2 * set + 1 become its sums.
template <int64_t group_size, int set>
MOEFLUX_INLINE void dot_group(const CodeChunk& chunk, const DigitTile* x, int64_t g) {
  zero_tile<2 * set>();
  zero_tile<2 * set + 1>();
  constexpr int64_t tiles = group_size == 128 ? 2 : 1;
  constexpr int64_t parts = group_size == 32 ? 2 : 1;  // groups a tile
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t t = g * tiles / parts + i;
    const int64_t part = g % parts;
    load_tile<6>(chunk.codes[t][0] + part * 32, tile_columns);
    load_tile<7>(x[t][0] + part * 512, 64);
    dot_tiles<2 * set, 6, 7>();
    load_tile<7>(x[t][1] + part * 512, 64);
    dot_tiles<2 * set + 1, 6, 7>();
  }
}

template <int set>
MOEFLUX_INLINE void store_sums(TileSums& sums) {
  store_tile<2 * set>(sums.high, 64);
  store_tile<2 * set + 1>(sums.low, 64);
}

// Like `add_block` for one row of x, where a lane is a row of the matrix. Here a lane is a row of x.
template <int bits>
MOEFLUX_INLINE void add_sums(const TileSums& sums, const PanelScales& panel, int64_t g, const DigitScales& x,
                             Floats (&total)[tile_rows]) {
  const Floats unit = load<Floats>(x.units);
  const Floats x_sum = load<Floats>(x.sums);
  const __m512i lift = (__m512i)(raise_of<bits> * load<Ints>(x.whole_sums));
  MOEFLUX_UNROLL
  for (int64_t r = 0; r < tile_rows; ++r) {
    const __m512i high = _mm512_maskz_slli_epi32(all_lanes, load<__m512i>(sums.high[r]), 8);
    const __m512i sum = _mm512_add_epi32(high, load<__m512i>(sums.low[r]));
    const Floats scale = splat(panel.scales[r][g]);
    if constexpr (raise_of<bits> > 0)
      total[r] = add_raised_group(total[r], sum, lift, scale, unit);
    else
      total[r] = add_group(total[r], floats(sum), scale, splat(panel.biases[r][g]), unit, x_sum);
  }
}

// to += the product over the chunk's groups, the first of which is group `first` of what is packed. It prefetches
// `lines` cache lines of `target` with each group. The tiles of a group are multiplied before the sums of the previous
// group are added, and stored after them, so that neither waits for the other.
template <int bits, int64_t group_size, int64_t lines>
static void add_chunk(const CodeChunk& chunk, const PanelScales& panel, const DigitPanel& x, int64_t first,
                      int64_t groups, const uint8_t* target, float (&to)[tile_rows][tile_rows]) {
  Floats total[tile_rows];
  MOEFLUX_UNROLL
  for (int64_t r = 0; r < tile_rows; ++r) total[r] = load<Floats>(to[r]);
  const DigitTile* tiles = x.tiles + first * group_size / tile_columns;
  TileSums even;
  TileSums odd;
  const auto add = [&](const TileSums& sums, int64_t g) __attribute__((always_inline)) {
    MOEFLUX_UNROLL
    for (int64_t line = 0; line < lines; ++line) prefetch_line<second_cache>(target, (g * lines + line) * 64);
    add_sums<bits>(sums, panel, first + g, x.scales[first + g], total);
  };
  dot_group<group_size, 0>(chunk, tiles, 0);
  store_sums<0>(even);
  for (int64_t g = 0; g < groups; g += 2) {
    if (g + 1 < groups) dot_group<group_size, 1>(chunk, tiles, g + 1);
    add(even, g);
    if (g + 1 == groups) break;
    store_sums<1>(odd);
    if (g + 2 < groups) dot_group<group_size, 0>(chunk, tiles, g + 2);
    add(odd, g + 1);
    if (g + 2 < groups) store_sums<0>(even);
  }
  MOEFLUX_UNROLL
  for (int64_t r = 0; r < tile_rows; ++r) store(to[r], total[r]);
}

// ---- Whole products ------------------------------------------------------------------------------------------------

struct TileRoom {
  alignas(64) DigitTile tiles[packed_columns / tile_columns];
  alignas(64) DigitScales scales[packed_columns / min_group];
  PanelScales panels[panels_together];
  CodeChunk chunk;
  alignas(64) float totals[pass_rows / tile_rows][x_tiles][tile_rows][tile_rows];
};

// Totals += the product over columns begin ... end - 1, for which rows of x are packed. Meanwhile it prefetches what
// follows the panels in memory, in the order of memory.
template <int bits, int64_t group_size>
static void multiply_panels(const Weights& w, int64_t first, int64_t last, int64_t begin, int64_t end,
                            const DigitPanel (&x)[x_tiles], int64_t tiles, TileRoom& room) {
  constexpr int64_t group_bytes = tile_rows * group_size * width_of(bits) / 8;  // of a group of 16 rows
  for (int64_t row = first; row < last; row += panels_together * tile_rows) {
    const int64_t panels = smaller(divide_up(last - row, tile_rows), panels_together);
    for (int64_t p = 0; p < panels; ++p)
      widen_scales(w, row + p * tile_rows, last, begin / group_size, (end - begin) / group_size, room.panels[p]);
    const uint8_t* target = w.codes + (row + panels_together * tile_rows) * w.code_stride +
                            begin / group_size * group_bytes * panels_together;
    float (*totals)[x_tiles][tile_rows][tile_rows] = room.totals + (row - first) / tile_rows;
    for (int64_t column = begin; column < end; column += chunk_columns) {
      const int64_t columns = smaller(end - column, chunk_columns);
      const int64_t groups = columns / group_size;
      const int64_t group = (column - begin) / group_size;
      for (int64_t p = 0; p < panels; ++p, target += groups * group_bytes) {
        unpack_chunk<bits, group_size>(w, row + p * tile_rows, last, column, int16_blocks(columns), room.chunk);
        add_chunk<bits, group_size, group_bytes / 64>(room.chunk, room.panels[p], x[0], group, groups, target,
                                                      totals[p][0]);
        for (int64_t t = 1; t < tiles; ++t)
          add_chunk<bits, group_size, 0>(room.chunk, room.panels[p], x[t], group, groups, target, totals[p][t]);
      }
    }
  }
}

template <int bits, int64_t group_size>
static void multiply_pass(const Weights& w, int64_t first, int64_t last, const uint8_t* const* x, float* const* out,
                          int64_t n, TileRoom& room) {
  const int64_t panels = divide_up(last - first, tile_rows);
  const int64_t tiles = divide_up(n, tile_rows);
  for (int64_t p = 0; p < panels; ++p)
    __builtin_memset(room.totals[p], 0, static_cast<size_t>(tiles) * sizeof room.totals[p][0]);
  const int64_t span = packed_columns / (tiles < 3 ? tiles : x_tiles);
  for (int64_t begin = 0; begin < w.columns; begin += span) {
    const int64_t end = smaller(begin + span, w.columns);
    DigitPanel packed[x_tiles];
    for (int64_t t = 0; t < tiles; ++t) {
      packed[t] = {room.tiles + t * (span / tile_columns), room.scales + t * (span / group_size)};
      pack_digits<group_size>(x + t * tile_rows, smaller(n - t * tile_rows, tile_rows), w.columns, begin,
                              int16_blocks(end - begin), packed[t]);
    }
    multiply_panels<bits, group_size>(w, first, last, begin, end, packed, tiles, room);
  }
  for (int64_t p = 0; p < panels; ++p) {
    const int64_t row = first + p * tile_rows;
    for (int64_t t = 0; t < tiles; ++t) {
      __m512i v[16];
      MOEFLUX_UNROLL
      for (int64_t r = 0; r < 16; ++r) v[r] = load<__m512i>(room.totals[p][t][r]);
      turn(v);
      for (int64_t i = 0; i < smaller(n - t * tile_rows, tile_rows); ++i)
        store_rows(out[t * tile_rows + i] + row, (Floats)v[i], last - row);
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

static void multiply_int16_or_tiles(const Weights& weights, int64_t first, int64_t last, const uint8_t* const* x,
                                    float* const* out, int64_t n, const ReadNext& next) {
  if (n < min_tile_rows || weights.block != BlockType::none || weights.group_size < min_group)
    return multiply_int16(weights, first, last, x, out, n, next);
  switch (weights.bits) {
    case 2:
      return multiply_tiles_of<2>(weights, first, last, x, out, n);
    case 3:
      return multiply_tiles_of<3>(weights, first, last, x, out, n);
    case 4:
      if (weights.scale_type == DType::u8) return multiply_tiles<e2m1, 32>(weights, first, last, x, out, n);
      return multiply_tiles_of<4>(weights, first, last, x, out, n);
    case 5:
      return multiply_tiles_of<5>(weights, first, last, x, out, n);
    case 6:
      return multiply_tiles_of<6>(weights, first, last, x, out, n);
    default:
      return multiply_tiles_of<8>(weights, first, last, x, out, n);
  }
}

constexpr Int16Kernels tile_kernels{convert_to_int16, multiply_int16_or_tiles};

}  // namespace moeflux::cpu::MOEFLUX_ISA
