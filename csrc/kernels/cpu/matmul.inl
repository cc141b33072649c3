// Weights are unpacked 32 columns at a time. That is a stretch: groups are whole stretches, and 32 codes of any width
// are whole words. With one row of x, the numbers stay in registers. With several rows of x, a panel of them is kept in
// the first-level cache.
#include "kernels/cpu/matmul.h"

#include "kernels/cpu/matmul_formats.inl"

namespace moeflux::cpu::MOEFLUX_ISA {

constexpr int64_t row_tile = 4;         // matrix rows that share a load of x
constexpr int64_t panel_columns = 512;  // whole groups of every size
constexpr int64_t scale_block = 64;     // how many groups have their scales widened at once
constexpr int64_t prefetch_bytes = 2048;

// Rows of x whose products with row_tile matrix rows fit in the registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int64_t x_tile = 4;
#else
constexpr int64_t x_tile = 2;
#endif

// ---- One row of x --------------------------------------------------------------------------------------------------

// Prefetches what comes `prefetch_bytes` later, even if that is in the next rows. It computes with a bare address,
// because the place may lie after the matrix.
MOEFLUX_INLINE void prefetch(const uint8_t* codes) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(codes) + prefetch_bytes));
}

template <typename Format>
MOEFLUX_INLINE int64_t columns_of_group(const Weights& w) {
  return in_pairs<Format> ? stretch : w.group_size;
}

// total[r] += W[row + r] . x over `columns`, whole stretches, of a plain matrix.
template <typename Format, int64_t rows>
MOEFLUX_INLINE void add_plain(const uint8_t* const (&codes)[rows], const float* x, int64_t columns,
                              Floats (&total)[rows]) {
  for (int64_t column = 0; column < columns; column += stretch) {
    const int64_t at = column / stretch * Format::stretch_bytes;
    MOEFLUX_UNROLL
    for (int64_t r = 0; r < rows; ++r) {
      prefetch(codes[r] + at);
      Floats numbers[stretch_vectors];
      Format::unpack({}, codes[r] + at, numbers);
      MOEFLUX_UNROLL
      for (int64_t v = 0; v < stretch_vectors; ++v)
        total[r] = fma(numbers[v], load<Floats>(x + column + v * lanes), total[r]);
    }
  }
}

// The same for an affine matrix and whole groups.
template <typename Format, int64_t stretches, int64_t rows>
MOEFLUX_INLINE void add_groups(const uint8_t* const (&codes)[rows], const float (&scales)[rows][scale_block],
                               const float (&biases)[rows][scale_block], const float* x, int64_t groups,
                               Floats (&total)[rows]) {
  constexpr int64_t group_bytes = stretches * Format::stretch_bytes;
  for (int64_t g = 0; g < groups; ++g) {
    MOEFLUX_UNROLL
    for (int64_t r = 0; r < rows; ++r) {
      prefetch(codes[r] + g * group_bytes);
      const typename Format::Group group = Format::group(scales[r][g], biases[r][g]);
      MOEFLUX_UNROLL
      for (int64_t s = 0; s < stretches; ++s) {
        Floats numbers[stretch_vectors];
        Format::unpack(group, codes[r] + g * group_bytes + s * Format::stretch_bytes, numbers);
        MOEFLUX_UNROLL
        for (int64_t v = 0; v < stretch_vectors; ++v)
          total[r] = fma(numbers[v], load<Floats>(x + (g * stretches + s) * stretch + v * lanes), total[r]);
      }
    }
  }
}

// The same for whole blocks.
template <typename Format, int64_t rows>
MOEFLUX_INLINE void add_blocks(const uint8_t* const (&codes)[rows], const float* x, int64_t columns,
                               Floats (&total)[rows]) {
  for (int64_t b = 0; b < columns / Format::shape.columns; ++b) {
    const int64_t at = b * Format::shape.bytes;
    BlockScales scales[rows];
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t line = 0; line < Format::shape.bytes; line += 64) prefetch(codes[r] + at + line);
      Block<Format::shape.type>::scales(codes[r] + at, scales[r]);
    }
    MOEFLUX_UNROLL_BLOCK
    for (int64_t s = 0; s < Format::stretches; ++s) MOEFLUX_UNROLL
    for (int64_t r = 0; r < rows; ++r) {
      Floats numbers[stretch_vectors];
      Format::unpack(scales[r], codes[r] + at, s, numbers);
      MOEFLUX_UNROLL
      for (int64_t v = 0; v < stretch_vectors; ++v)
        total[r] = fma(numbers[v], load<Floats>(x + b * Format::shape.columns + s * stretch + v * lanes), total[r]);
    }
  }
}

// The scales and biases of `count` groups of a row from group `first` on. Where groups are half a stretch, two of them
// count as one: the scale of the second stands in place of a bias.
template <typename Format>
MOEFLUX_INLINE void widen_groups(const Weights& w, int64_t row, int64_t first, int64_t count,
                                 float (&scales)[scale_block], float (&biases)[scale_block]) {
  const int64_t scale_bytes = scale_bytes_of(w.scale_type);
  if constexpr (in_pairs<Format>) {
    const uint8_t* from = w.scales + row * w.scale_stride;
    const float of_row = w.row_scale_bytes ? load<float>(from) : 1.0f;
    float both[2 * scale_block];
    widen_all(w.scale_type, from + w.row_scale_bytes + 2 * first * scale_bytes, 2 * count, both);
    for (int64_t i = 0; i < count; ++i) {
      scales[i] = both[2 * i] * of_row;
      biases[i] = both[2 * i + 1] * of_row;
    }
  } else {
    const int64_t at = row * w.scale_stride + first * scale_bytes;
    widen_all(w.scale_type, w.scales + at, count, scales);
    widen_all(w.scale_type, w.biases + at, count, biases);
  }
}

// The same of one group.
template <typename Format>
MOEFLUX_INLINE typename Format::Group group_of(const Weights& w, int64_t row, int64_t g) {
  if constexpr (in_pairs<Format>) {
    const uint8_t* from = w.scales + row * w.scale_stride;
    const float of_row = w.row_scale_bytes ? load<float>(from) : 1.0f;
    const uint8_t* both = from + w.row_scale_bytes + 2 * g;
    return Format::group(widen_one(w.scale_type, both) * of_row, widen_one(w.scale_type, both + 1) * of_row);
  } else {
    const int64_t at = row * w.scale_stride + g * scale_bytes_of(w.scale_type);
    return Format::group(widen_one(w.scale_type, w.scales + at), widen_one(w.scale_type, w.biases + at));
  }
}

// What is left of a plain row after its whole stretches, followed by zeros.
template <typename Format>
MOEFLUX_INLINE void copy_tail(const Weights& w, int64_t row, uint8_t (&tail)[Format::stretch_bytes]) {
  const int64_t whole = w.columns / stretch * Format::stretch_bytes;
  const int64_t bytes = w.columns % stretch * (Format::stretch_bytes / stretch);
  __builtin_memset(tail, 0, sizeof tail);
  __builtin_memcpy(tail, w.codes + row * w.code_stride + whole, static_cast<size_t>(bytes));
}

MOEFLUX_INLINE void copy_tail_of_x(const Weights& w, const float* x, float (&tail)[stretch]) {
  __builtin_memset(tail, 0, sizeof tail);
  __builtin_memcpy(tail, x + w.columns / stretch * stretch, static_cast<size_t>(w.columns % stretch) * sizeof(float));
}

// The stretch that begins at `column`, with zeros past the end of the row.
template <typename Format>
MOEFLUX_INLINE void unpack_stretch(const Weights& w, int64_t row, int64_t column, Floats (&out)[stretch_vectors]) {
  if constexpr (in_blocks<Format>) {
    const uint8_t* block = w.codes + row * w.code_stride + column / Format::shape.columns * Format::shape.bytes;
    BlockScales scales;
    Block<Format::shape.type>::scales(block, scales);
    Format::unpack(scales, block, column % Format::shape.columns / stretch, out);
  } else if constexpr (Format::affine) {
    const uint8_t* codes = w.codes + row * w.code_stride + column / stretch * Format::stretch_bytes;
    Format::unpack(group_of<Format>(w, row, column / columns_of_group<Format>(w)), codes, out);
  } else {
    const uint8_t* codes = w.codes + row * w.code_stride + column / stretch * Format::stretch_bytes;
    uint8_t tail[Format::stretch_bytes];
    if (w.columns - column < stretch) {
      copy_tail<Format>(w, row, tail);
      codes = tail;
    }
    Format::unpack({}, codes, out);
  }
}

template <typename Format, int64_t rows>
static void multiply_one(const Weights& w, int64_t row, const float* x, float* out) {
  const uint8_t* codes[rows];
  Floats total[rows] = {};
  for (int64_t r = 0; r < rows; ++r) codes[r] = w.codes + (row + r) * w.code_stride;
  if constexpr (Format::affine) {
    const int64_t group_columns = columns_of_group<Format>(w);
    const int64_t groups = w.columns / group_columns;
    for (int64_t first = 0; first < groups; first += scale_block) {
      const int64_t count = groups - first < scale_block ? groups - first : scale_block;
      float scales[rows][scale_block];
      float biases[rows][scale_block];
      for (int64_t r = 0; r < rows; ++r) widen_groups<Format>(w, row + r, first, count, scales[r], biases[r]);
      const float* from = x + first * group_columns;
      if (group_columns == 32)
        add_groups<Format, 1>(codes, scales, biases, from, count, total);
      else if (group_columns == 64)
        add_groups<Format, 2>(codes, scales, biases, from, count, total);
      else
        add_groups<Format, 4>(codes, scales, biases, from, count, total);
      for (int64_t r = 0; r < rows; ++r) codes[r] += count * group_columns / stretch * Format::stretch_bytes;
    }
  } else if constexpr (in_blocks<Format>) {
    add_blocks<Format>(codes, x, w.columns, total);
  } else {
    add_plain<Format>(codes, x, w.columns / stretch * stretch, total);
    if (w.columns % stretch) {
      uint8_t tails[rows][Format::stretch_bytes];
      float x_tail[stretch];
      copy_tail_of_x(w, x, x_tail);
      for (int64_t r = 0; r < rows; ++r) {
        copy_tail<Format>(w, row + r, tails[r]);
        codes[r] = tails[r];
      }
      add_plain<Format>(codes, x_tail, stretch, total);
    }
  }
  for (int64_t r = 0; r < rows; ++r) out[row + r] = sum(total[r]);
}

// ---- Several rows of x ---------------------------------------------------------------------------------------------

MOEFLUX_INLINE void store_numbers(const Floats (&numbers)[stretch_vectors], float* out) {
  MOEFLUX_UNROLL
  for (int64_t v = 0; v < stretch_vectors; ++v) store(out + v * lanes, numbers[v]);
}

// Columns column ... column + count - 1 of one row as f32; whole stretches, and whole groups unless it is one stretch.
template <typename Format>
MOEFLUX_INLINE void unpack_groups(const Weights& w, int64_t row, int64_t column, int64_t count, float* out) {
  const uint8_t* codes = w.codes + row * w.code_stride + column / stretch * Format::stretch_bytes;
  const int64_t end = column + count;
  while (column < end) {
    typename Format::Group group{};
    int64_t stop = end;
    if constexpr (Format::affine) {
      const int64_t g = column / columns_of_group<Format>(w);
      group = group_of<Format>(w, row, g);
      const int64_t next = (g + 1) * columns_of_group<Format>(w);
      stop = next < end ? next : end;
    }
    for (; column < stop; column += stretch, codes += Format::stretch_bytes, out += stretch) {
      Floats numbers[stretch_vectors];
      Format::unpack(group, codes, numbers);
      store_numbers(numbers, out);
    }
  }
}

// The same for whole blocks, so many columns from a block on.
template <typename Format>
MOEFLUX_INLINE void unpack_blocks(const uint8_t* block, int64_t columns, float* out) {
  for (int64_t column = 0; column < columns; column += Format::shape.columns, block += Format::shape.bytes) {
    BlockScales scales;
    Block<Format::shape.type>::scales(block, scales);
    MOEFLUX_UNROLL_BLOCK
    for (int64_t s = 0; s < Format::stretches; ++s, out += stretch) {
      Floats numbers[stretch_vectors];
      Format::unpack(scales, block, s, numbers);
      store_numbers(numbers, out);
    }
  }
}

// Columns column ... column + count - 1 of one row as f32; whole stretches, and whole groups or blocks unless it is one
// stretch.
template <typename Format>
MOEFLUX_INLINE void unpack_columns(const Weights& w, int64_t row, int64_t column, int64_t count, float* out) {
  if constexpr (in_blocks<Format>) {
    const uint8_t* first = w.codes + row * w.code_stride + column / Format::shape.columns * Format::shape.bytes;
    return unpack_blocks<Format>(first, count, out);
  } else {
    unpack_groups<Format>(w, row, column, count, out);
  }
}
struct Panel {
  alignas(64) float numbers[row_tile][panel_columns];
  alignas(64) float totals[max_block][row_tile][lanes];
};

// totals += panel . x for `count` rows of x, over `columns`, whole stretches.
template <int64_t count>
MOEFLUX_INLINE void add_tile(Panel& panel, int64_t columns, const float* const* x, int64_t first_column, int64_t at) {
  Floats total[count][row_tile];
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < count; ++i) MOEFLUX_UNROLL
  for (int64_t r = 0; r < row_tile; ++r) total[i][r] = load<Floats>(panel.totals[at + i][r]);
  for (int64_t column = 0; column < columns; column += lanes) {
    Floats numbers[row_tile];
    MOEFLUX_UNROLL
    for (int64_t r = 0; r < row_tile; ++r) numbers[r] = load<Floats>(panel.numbers[r] + column);
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < count; ++i) {
      const Floats value = load<Floats>(x[at + i] + first_column + column);
      MOEFLUX_UNROLL
      for (int64_t r = 0; r < row_tile; ++r) total[i][r] = fma(numbers[r], value, total[i][r]);
    }
  }
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < count; ++i) MOEFLUX_UNROLL
  for (int64_t r = 0; r < row_tile; ++r) store(panel.totals[at + i][r], total[i][r]);
}

static void add_panel(Panel& panel, int64_t columns, const float* const* x, int64_t first_column, int64_t n) {
  int64_t i = 0;
  for (; i + x_tile <= n; i += x_tile) add_tile<x_tile>(panel, columns, x, first_column, i);
  if constexpr (x_tile > 2) {
    for (; i + 2 <= n; i += 2) add_tile<2>(panel, columns, x, first_column, i);
  }
  if (i < n) add_tile<1>(panel, columns, x, first_column, i);
}

template <typename Format>
static void multiply_block(const Weights& w, int64_t first, int64_t last, const float* const* x, float* const* out,
                           int64_t n) {
  const int64_t whole = w.columns / stretch * stretch;
  float x_tails[max_block][stretch];
  const float* x_tail[max_block];
  if (whole < w.columns) {
    for (int64_t i = 0; i < n; ++i) {
      copy_tail_of_x(w, x[i], x_tails[i]);
      x_tail[i] = x_tails[i];
    }
  }
  Panel panel;
  __builtin_memset(panel.numbers, 0, sizeof panel.numbers);  // rows from `last` on are computed and thrown away
  for (int64_t row = first; row < last; row += row_tile) {
    const int64_t rows = last - row < row_tile ? last - row : row_tile;
    __builtin_memset(panel.totals, 0, static_cast<size_t>(n) * sizeof panel.totals[0]);
    for (int64_t column = 0; column < whole; column += panel_columns) {
      const int64_t columns = whole - column < panel_columns ? whole - column : panel_columns;
      for (int64_t r = 0; r < rows; ++r) unpack_columns<Format>(w, row + r, column, columns, panel.numbers[r]);
      add_panel(panel, columns, x, column, n);
    }
    if (whole < w.columns) {
      for (int64_t r = 0; r < rows; ++r) {
        Floats numbers[stretch_vectors];
        unpack_stretch<Format>(w, row + r, whole, numbers);
        MOEFLUX_UNROLL
        for (int64_t v = 0; v < stretch_vectors; ++v) store(panel.numbers[r] + v * lanes, numbers[v]);
      }
      add_panel(panel, stretch, x_tail, 0, n);
    }
    for (int64_t i = 0; i < n; ++i)
      for (int64_t r = 0; r < rows; ++r) out[i][row + r] = sum(load<Floats>(panel.totals[i][r]));
  }
}

template <typename Format>
static void multiply_with(const Weights& w, int64_t first, int64_t last, const float* const* x, float* const* out,
                          int64_t n) {
  if (n > 1) return multiply_block<Format>(w, first, last, x, out, n);
  for (; first + row_tile <= last; first += row_tile) multiply_one<Format, row_tile>(w, first, *x, *out);
  for (; first < last; ++first) multiply_one<Format, 1>(w, first, *x, *out);
}

// ---- Transposed, and single rows -----------------------------------------------------------------------------------

// The numbers of a stretch, or of what there is of it.
MOEFLUX_INLINE void store_stretch(const Weights& w, int64_t column, const Floats (&numbers)[stretch_vectors],
                                  float* out) {
  const int64_t count = w.columns - column < stretch ? w.columns - column : stretch;
  MOEFLUX_UNROLL
  for (int64_t v = 0; v < stretch_vectors; ++v) {
    const int64_t left = count - v * lanes;
    if (left >= lanes)
      store(out + column + v * lanes, numbers[v]);
    else if (left > 0)
      store_some(out + column + v * lanes, numbers[v], left);
  }
}

template <typename Format, int64_t count>
MOEFLUX_INLINE void transposed_tile(const Weights& w, int64_t rows, int64_t column, const float* const* x,
                                    float* const* out) {
  Floats total[count][stretch_vectors] = {};
  for (int64_t row = 0; row < rows; ++row) {
    Floats numbers[stretch_vectors];
    unpack_stretch<Format>(w, row, column, numbers);
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < count; ++i) MOEFLUX_UNROLL
    for (int64_t v = 0; v < stretch_vectors; ++v) total[i][v] = fma(splat(x[i][row]), numbers[v], total[i][v]);
  }
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < count; ++i) store_stretch(w, column, total[i], out[i]);
}

template <typename Format>
static void multiply_transposed_with(const Weights& w, int64_t rows, int64_t first, int64_t last, const float* const* x,
                                     float* const* out, int64_t n) {
  constexpr int64_t tile = 16 / stretch_vectors;  // 8, 4, 2
  for (int64_t column = first; column < last; column += stretch) {
    int64_t i = 0;
    for (; i + tile <= n; i += tile) transposed_tile<Format, tile>(w, rows, column, x + i, out + i);
    for (; i < n; ++i) transposed_tile<Format, 1>(w, rows, column, x + i, out + i);
  }
}

template <typename Format>
static void dequantize_with(const Weights& w, int64_t row, float* out) {
  for (int64_t column = 0; column < w.columns; column += stretch) {
    Floats numbers[stretch_vectors];
    unpack_stretch<Format>(w, row, column, numbers);
    store_stretch(w, column, numbers, out);
  }
}

// ---- Choice of format ----------------------------------------------------------------------------------------------

#define MOEFLUX_FOR_BLOCK(type, function, ...) \
  case BlockType::type:                        \
    return function<Blocks<BlockType::type>>(weights, __VA_ARGS__)

#define MOEFLUX_FOR_FORMAT(function, ...)                                                         \
  switch (weights.block) {                                                                        \
    MOEFLUX_FOR_BLOCK(q8_0, function, __VA_ARGS__);                                               \
    MOEFLUX_FOR_BLOCK(q4_0, function, __VA_ARGS__);                                               \
    MOEFLUX_FOR_BLOCK(q4_1, function, __VA_ARGS__);                                               \
    MOEFLUX_FOR_BLOCK(q5_0, function, __VA_ARGS__);                                               \
    MOEFLUX_FOR_BLOCK(q5_1, function, __VA_ARGS__);                                               \
    MOEFLUX_FOR_BLOCK(q2_k, function, __VA_ARGS__);                                               \
    MOEFLUX_FOR_BLOCK(q3_k, function, __VA_ARGS__);                                               \
    MOEFLUX_FOR_BLOCK(q4_k, function, __VA_ARGS__);                                               \
    MOEFLUX_FOR_BLOCK(q5_k, function, __VA_ARGS__);                                               \
    MOEFLUX_FOR_BLOCK(q6_k, function, __VA_ARGS__);                                               \
    MOEFLUX_FOR_BLOCK(iq4_nl, function, __VA_ARGS__);                                             \
    MOEFLUX_FOR_BLOCK(iq4_xs, function, __VA_ARGS__);                                             \
    MOEFLUX_FOR_BLOCK(mxfp4, function, __VA_ARGS__);                                              \
    case BlockType::none:                                                                         \
      break;                                                                                      \
  }                                                                                               \
  switch (weights.bits) {                                                                         \
    case 2:                                                                                       \
      return function<Affine<2>>(weights, __VA_ARGS__);                                           \
    case 3:                                                                                       \
      return function<Affine<3>>(weights, __VA_ARGS__);                                           \
    case 4:                                                                                       \
      if (weights.scale_type == DType::u8) return function<E2m1>(weights, __VA_ARGS__);           \
      if (weights.scale_type == DType::f8_e4m3) return function<E2m1Pairs>(weights, __VA_ARGS__); \
      return function<Affine<4>>(weights, __VA_ARGS__);                                           \
    case 5:                                                                                       \
      return function<Affine<5>>(weights, __VA_ARGS__);                                           \
    case 6:                                                                                       \
      return function<Affine<6>>(weights, __VA_ARGS__);                                           \
    case 8:                                                                                       \
      if (weights.element == DType::f8_e4m3) return function<E4m3<false>>(weights, __VA_ARGS__);  \
      if (weights.scale_type == DType::u8) return function<E4m3<true>>(weights, __VA_ARGS__);     \
      return function<Affine<8>>(weights, __VA_ARGS__);                                           \
    default:                                                                                      \
      break;                                                                                      \
  }                                                                                               \
  if (weights.element == DType::bf16) return function<Plain<DType::bf16>>(weights, __VA_ARGS__);  \
  if (weights.element == DType::f16) return function<Plain<DType::f16>>(weights, __VA_ARGS__);    \
  return function<Plain<DType::f32>>(weights, __VA_ARGS__)

static void multiply(const Weights& weights, int64_t first, int64_t last, const float* const* x, float* const* out,
                     int64_t n) {
  MOEFLUX_FOR_FORMAT(multiply_with, first, last, x, out, n);
}

static void multiply_transposed(const Weights& weights, int64_t rows, int64_t first, int64_t last,
                                const float* const* x, float* const* out, int64_t n) {
  MOEFLUX_FOR_FORMAT(multiply_transposed_with, rows, first, last, x, out, n);
}

static void dequantize(const Weights& weights, int64_t row, float* out) {
  MOEFLUX_FOR_FORMAT(dequantize_with, row, out);
}

#undef MOEFLUX_FOR_FORMAT
#undef MOEFLUX_FOR_BLOCK

constexpr MatmulKernels matmul_kernels{multiply, multiply_transposed, dequantize};

}  // namespace moeflux::cpu::MOEFLUX_ISA
