// Products of whole numbers (see int16.h) for instruction sets that multiply words and add up pairs of products in 32
// bits: AVX2 and NEON. The numbers of x are whole, not in digits, and codes become words, so no sum can overflow. The
// sums are those of digits, and so are all bits.
//
// A vector holds parts of one matrix row's sum. The vectors of as many rows as there are lanes are added up together,
// so that each lane becomes a row. With several rows of x, the words of a block are kept in the first-level cache.
#include "kernels/cpu/word_codes.inl"

namespace moeflux::cpu::MOEFLUX_ISA {

// ---- Rows of x -----------------------------------------------------------------------------------------------------

// The nearest whole numbers, ties to even.
MOEFLUX_INLINE Ints nearest(Floats numbers) {
#if defined(__AVX2__)
  return (Ints)_mm256_cvtps_epi32((__m256)numbers);
#else
  return (Ints)vcvtnq_s32_f32((float32x4_t)numbers);
#endif
}

template <int64_t group_size>
static void convert_row(const float* x, int64_t columns, uint8_t* row) {
  const DigitRow to = digit_row(row, columns, group_size);
  float* units = const_cast<float*>(to.units);
  float* sums = const_cast<float*>(to.sums);
  int32_t* whole_sums = const_cast<int32_t*>(to.whole_sums);
  const int64_t all = int16_groups(columns, group_size);
  for (int64_t g = 0; g < all; ++g) {
    const int64_t column = g * group_size;
    const bool there = column < columns;
    alignas(32) int32_t whole[group_size] = {};
    Unit of_group = {};
    uint32_t total = 0;
    if (there) {
      Ints largest = {};
      for (int64_t i = 0; i < group_size; i += lanes) {
        const Ints bits = load<Ints>(x + column + i) & 0x7fffffff;
        largest = bits > largest ? bits : largest;
      }
      int32_t largest_bits = 0;
      for (int64_t i = 0; i < lanes; ++i) largest_bits = largest[i] > largest_bits ? largest[i] : largest_bits;
      of_group = unit_of(largest_bits);
      Words totals = {};  // which wrap around: numbers that are not finite may make any whole ones
      for (int64_t i = 0; i < group_size; i += lanes) {
        const Ints numbers = nearest(load<Floats>(x + column + i) * of_group.inverse);
        store(whole + i, numbers);
        totals += (Words)numbers;
      }
      for (int64_t i = 0; i < lanes; ++i) total += totals[i];
    }
    units[g] = of_group.unit;
    whole_sums[g] = static_cast<int32_t>(total);
    sums[g] = of_group.unit * static_cast<float>(whole_sums[g]);
    for (int64_t i = 0; i < group_size; ++i) {
      const int64_t at = column + i;
      const int64_t place = at / stretch * stretch + at % 2 * 16 + at % stretch / 2;
      const int16_t word = static_cast<int16_t>(whole[i]);
      __builtin_memcpy(row + place * 2, &word, sizeof word);
    }
  }
}

static void convert_to_int16(const float* x, int64_t columns, int64_t group_size, uint8_t* words) {
  if (group_size == 16) return convert_row<16>(x, columns, words);
  if (group_size == 32) return convert_row<32>(x, columns, words);
  if (group_size == 64) return convert_row<64>(x, columns, words);
  return convert_row<128>(x, columns, words);
}

// ---- Sums of a block -----------------------------------------------------------------------------------------------

constexpr int64_t block_stretches = int16_block / stretch;

// sum + the products of words. Which lane gets which of them is the instruction's own matter, but all of a half of a
// vector stay in that half.
MOEFLUX_INLINE Ints add_products(Ints sum, Shorts codes, Shorts x) {
#if defined(__AVX2__)
  return sum + (Ints)_mm256_madd_epi16((__m256i)codes, (__m256i)x);
#else
  const int16x8_t a = (int16x8_t)codes;
  const int16x8_t b = (int16x8_t)x;
  return (Ints)vmlal_high_s16(vmlal_s16((int32x4_t)sum, vget_low_s16(a), vget_low_s16(b)), a, b);
#endif
}

// Sums of neighbouring lanes: of `a`, and then of `b`; with AVX2 those of each half.
MOEFLUX_INLINE Ints sums_of_neighbours(Ints a, Ints b) {
#if defined(__AVX2__)
  const __m256 first = (__m256)a;
  const __m256 second = (__m256)b;
  return (Ints)_mm256_shuffle_ps(first, second, 0x88) + (Ints)_mm256_shuffle_ps(first, second, 0xdd);
#else
  return (Ints)vpaddq_s32((int32x4_t)a, (int32x4_t)b);
#endif
}

template <int64_t group_size>
constexpr int64_t block_groups_of = int16_block / group_size;

// Of two rows of the matrix each: vectors of a group; with AVX2 the two groups of a stretch are the halves of one.
template <int64_t group_size>
constexpr int64_t group_vectors = lanes == 8 && group_size == 16 ? block_stretches : block_groups_of<group_size>;
template <int64_t group_size>
using PairSums = Ints[group_vectors<group_size>][lanes / 2];

// Adds up the lanes of so many rows: sums[g] has a row in each lane.
template <int64_t group_size>
MOEFLUX_INLINE void add_lanes(const PairSums<group_size>& pairs, Ints (&sums)[block_groups_of<group_size>]) {
  MOEFLUX_UNROLL
  for (int64_t g = 0; g < group_vectors<group_size>; ++g) {
#if defined(__AVX2__)
    const __m256i first = (__m256i)sums_of_neighbours(pairs[g][0], pairs[g][1]);
    const __m256i second = (__m256i)sums_of_neighbours(pairs[g][2], pairs[g][3]);
    const Ints low = (Ints)_mm256_permute2x128_si256(first, second, 0x20);
    const Ints high = (Ints)_mm256_permute2x128_si256(first, second, 0x31);
    if constexpr (group_size == 16) {
      sums[2 * g] = low;
      sums[2 * g + 1] = high;
    } else {
      sums[g] = low + high;
    }
#else
    sums[g] = sums_of_neighbours(pairs[g][0], pairs[g][1]);
#endif
  }
}

// The sums of one row over `stretches` of a block. words(s, to) makes the words of one.
template <int64_t group_size, typename WordsOf>
MOEFLUX_INLINE void sums_of_row(const WordsOf& words, const uint8_t* x, int64_t stretches,
                                Ints (&sums)[group_vectors<group_size>]) {
  constexpr int64_t vectors = group_vectors<group_size>;
  MOEFLUX_UNROLL
  for (Ints& sum : sums) sum = Ints{};
  MOEFLUX_UNROLL
  for (int64_t s = 0; s < block_stretches; ++s) {
    if (s >= stretches) break;
    StretchWords codes;
    words(s, codes);
    MOEFLUX_UNROLL
    for (int64_t v = 0; v < 2 * half_vectors; ++v) {
      const int64_t at = s * vectors / block_stretches + (vectors > block_stretches ? v % half_vectors : 0);
      sums[at] = add_products(sums[at], codes[v], load<Shorts>(x + s * 2 * stretch + v * 4 * lanes));
    }
  }
}

// The same of words that lie in memory, of a whole block.
template <int64_t group_size>
MOEFLUX_INLINE void sums_of_panel(const uint8_t* panel, const uint8_t* x, Ints (&sums)[group_vectors<group_size>]) {
  const auto words = [&](int64_t s, StretchWords& to) __attribute__((always_inline)) {
    MOEFLUX_UNROLL
    for (int64_t v = 0; v < 2 * half_vectors; ++v) to[v] = load<Shorts>(panel + s * 2 * stretch + v * 4 * lanes);
  };
  sums_of_row<group_size>(words, x, block_stretches, sums);
}

// ---- Products ------------------------------------------------------------------------------------------------------

// Rows of the matrix that are computed together, one per lane, from `first` on. Where the matrix ends before, its last
// row stands for those that are missing.
struct RowsTogether {
  int64_t rows[lanes];
  int64_t wanted;
};

MOEFLUX_INLINE RowsTogether rows_together(int64_t first, int64_t last) {
  RowsTogether to;
  for (int64_t r = 0; r < lanes; ++r) to.rows[r] = smaller(first + r, last - 1);
  to.wanted = smaller(lanes, last - first);
  return to;
}

template <int bits, int64_t group_size>
constexpr int64_t chains_of = bits == e2m1 && group_size == 16 ? block_groups_of<16> : 1;

// total + a block's part, for the groups from `g` on.
template <int bits, int64_t group_size>
MOEFLUX_INLINE void add_block(const Ints (&sums)[block_groups_of<group_size>], const RowScales& scales,
                              const DigitRow& x, int64_t g, Floats* total) {
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < block_groups_of<group_size>; ++i) {
    const int64_t at = (g + i) % scale_groups;
    Floats& chain = total[i % chains_of<bits, group_size>];
    const Floats sum = __builtin_convertvector(sums[i], Floats);
    const Floats unit = splat(x.units[g + i]);
    if constexpr (has_bias<bits>)
      chain = add_group(chain, sum, scales.scales[at], scales.biases[at], unit, splat(x.sums[g + i]));
    else
      chain = fma(sum, scales.scales[at] * unit, chain);
  }
}

// The sum of a row's chains. Those of NVFP4 are multiplied by the scale of the row: groups had 256ths of scales, for
// twice the numbers.
template <int bits, int64_t group_size>
MOEFLUX_INLINE Floats sum_of_chains(const Weights& w, const RowsTogether& rows, const Floats* total) {
  if constexpr (chains_of<bits, group_size> == 1) return total[0];
  const Floats sum = ((total[0] + total[1]) + (total[2] + total[3])) + ((total[4] + total[5]) + (total[6] + total[7]));
  Floats of_rows = splat(1.0f);
  if (w.row_scale_bytes)
    for (int64_t r = 0; r < lanes; ++r) of_rows[r] = load<float>(w.scales + rows.rows[r] * w.scale_stride);
  return sum * 128.0f * of_rows;
}

MOEFLUX_INLINE void store_wanted(const RowsTogether& rows, float* out, Floats sums) {
  if (rows.wanted == lanes)
    store(out + rows.rows[0], sums);
  else
    store_some(out + rows.rows[0], sums, rows.wanted);
}

// What is read next, at so many bytes of codes behind these rows.
MOEFLUX_INLINE const uint8_t* read_next(const Weights& w, int64_t row, int64_t last, const ReadNext& next) {
  return row + lanes < last || !next.codes ? w.codes + (row + lanes) * w.code_stride : next.codes;
}

constexpr int64_t far_behind = 12288;  // bytes, of what goes to the second-level cache

// The lines of what comes next that go with row `r` of a block.
template <int bits>
MOEFLUX_INLINE void prefetch_with(const uint8_t* next, int64_t r) {
  constexpr int64_t lines = bytes_of_128(bits) * lanes / 64;
  const auto from = reinterpret_cast<uintptr_t>(next);
  for (int64_t i = r * lines / lanes; i < (r + 2) * lines / lanes; ++i) {
    __builtin_prefetch(reinterpret_cast<const void*>(from + i * 64), 0, 3);
    __builtin_prefetch(reinterpret_cast<const void*>(from + i * 64 + far_behind), 0, 2);
  }
}

// So many rows of the matrix and one of x.
template <int bits, int64_t group_size>
static void multiply_one_row(const Weights& w, int64_t row, int64_t last, const uint8_t* x, float* out,
                             const ReadNext& next) {
  constexpr int64_t block_bytes = bytes_of_128(bits);
  constexpr int64_t block_groups = block_groups_of<group_size>;
  const RowsTogether rows = rows_together(row, last);
  const DigitRow from = digit_row(x, w.columns, group_size);
  const uint8_t* ahead = read_next(w, row, last, next);
  const int64_t groups = w.columns / group_size;
  Floats total[chains_of<bits, group_size>] = {};
  RowScales scales;
  for (int64_t b = 0; b < int16_blocks(w.columns); ++b) {
    const int64_t g = b * block_groups;
    if (g % scale_groups == 0)
      load_scales<bits, group_size>(w, rows.rows, g, smaller(groups - g, scale_groups), scales);
    const int64_t left = (w.columns - b * int16_block) / stretch;
    const uint8_t* digits = from.digits + b * int16_block_bytes;
    const auto sums_of = [&](int64_t r, int64_t stretches, auto& sums) __attribute__((always_inline)) {
      const uint8_t* codes = w.codes + rows.rows[r] * w.code_stride + b * block_bytes;
      const auto words = [&](int64_t s, StretchWords& to)
                             __attribute__((always_inline)) { words_at<bits>(codes, b % 2, s, to); };
      sums_of_row<group_size>(words, digits, stretches, sums);
    };
    PairSums<group_size> pairs;
    for (int64_t r = 0; r < lanes; r += 2) {
      prefetch_with<bits>(ahead + b * lanes * block_bytes, r);
      Ints first[group_vectors<group_size>];
      Ints second[group_vectors<group_size>];
      if (left >= block_stretches) {
        sums_of(r, block_stretches, first);
        sums_of(r + 1, block_stretches, second);
      } else {
        sums_of(r, left, first);
        sums_of(r + 1, left, second);
      }
      MOEFLUX_UNROLL
      for (int64_t i = 0; i < group_vectors<group_size>; ++i) pairs[i][r / 2] = sums_of_neighbours(first[i], second[i]);
    }
    Ints sums[block_groups];
    add_lanes<group_size>(pairs, sums);
    add_block<bits, group_size>(sums, scales, from, g, total);
  }
  store_wanted(rows, out, sum_of_chains<bits, group_size>(w, rows, total));
}

// And several of x.
template <int bits, int64_t group_size>
static void multiply_several(const Weights& w, int64_t row, int64_t last, const uint8_t* const* x, float* const* out,
                             int64_t n, const ReadNext& next) {
  constexpr int64_t block_bytes = bytes_of_128(bits);
  constexpr int64_t block_groups = block_groups_of<group_size>;
  constexpr int64_t chains = chains_of<bits, group_size>;
  const RowsTogether rows = rows_together(row, last);
  const uint8_t* ahead = read_next(w, row, last, next);
  const int64_t groups = w.columns / group_size;
  Floats total[max_block * chains];
  for (int64_t i = 0; i < n * chains; ++i) total[i] = Floats{};
  RowScales scales;
  alignas(32) uint8_t panel[lanes][int16_block_bytes] = {};  // what is left of a block before is met by zeros of x
  for (int64_t b = 0; b < int16_blocks(w.columns); ++b) {
    const int64_t g = b * block_groups;
    if (g % scale_groups == 0)
      load_scales<bits, group_size>(w, rows.rows, g, smaller(groups - g, scale_groups), scales);
    for (int64_t r = 0; r < lanes; ++r) {
      if (r % 2 == 0) prefetch_with<bits>(ahead + b * lanes * block_bytes, r);
      const uint8_t* codes = w.codes + rows.rows[r] * w.code_stride + b * block_bytes;
      MOEFLUX_UNROLL
      for (int64_t s = 0; s < block_stretches; ++s) {
        if (b * int16_block + s * stretch >= w.columns) break;
        StretchWords words;
        words_at<bits>(codes, b % 2, s, words);
        MOEFLUX_UNROLL
        for (int64_t v = 0; v < 2 * half_vectors; ++v) store(panel[r] + s * 2 * stretch + v * 4 * lanes, words[v]);
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      const DigitRow from = digit_row(x[i], w.columns, group_size);
      const uint8_t* digits = from.digits + b * int16_block_bytes;
      PairSums<group_size> pairs;
      for (int64_t r = 0; r < lanes; r += 2) {
        Ints both[2][group_vectors<group_size>];
        MOEFLUX_UNROLL
        for (int64_t j = 0; j < 2; ++j) sums_of_panel<group_size>(panel[r + j], digits, both[j]);
        MOEFLUX_UNROLL
        for (int64_t v = 0; v < group_vectors<group_size>; ++v)
          pairs[v][r / 2] = sums_of_neighbours(both[0][v], both[1][v]);
      }
      Ints sums[block_groups];
      add_lanes<group_size>(pairs, sums);
      add_block<bits, group_size>(sums, scales, from, g, total + i * chains);
    }
  }
  for (int64_t i = 0; i < n; ++i)
    store_wanted(rows, out[i], sum_of_chains<bits, group_size>(w, rows, total + i * chains));
}

template <int bits, int64_t group_size>
static void multiply_rows(const Weights& w, int64_t first, int64_t last, const uint8_t* const* x, float* const* out,
                          int64_t n, const ReadNext& next) {
  for (; first < last; first += lanes) {
    if (n == 1)
      multiply_one_row<bits, group_size>(w, first, last, *x, *out, next);
    else
      multiply_several<bits, group_size>(w, first, last, x, out, n, next);
  }
}

}  // namespace moeflux::cpu::MOEFLUX_ISA

#include "kernels/cpu/int16_formats.inl"
