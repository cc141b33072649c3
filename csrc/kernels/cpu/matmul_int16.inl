// Products of digits and codes (see int16.h) with AVX-512.
//
// For one row of x, a vector holds parts of one matrix row's sum. The vectors of sixteen rows are added up together, so
// that each lane becomes a row. For several rows of x, the codes are transposed first, and lanes are rows from the
// start. The scales of a group are transposed in both cases.
#include "kernels/cpu/int16_one_row.inl"

namespace moeflux::cpu::MOEFLUX_ISA {

// ---- Several rows of x ---------------------------------------------------------------------------------------------
//
// Here a lane is a matrix row from the start. The codes of a block are transposed once for all rows of x, and four
// columns of a row of x go to all lanes. So no lanes are added up, and besides the products only a few instructions per
// group remain.

constexpr int64_t block_words = int16_block / 8;  // of four even columns or four odd ones
constexpr int64_t rows_together = 4;              // of x, beyond those that are few

// With so few rows of x, each number of them has instructions of its own, and the codes need not leave the registers,
// or only once. It pays where codes are transposed as they lie in memory.
template <int bits>
constexpr int64_t few_rows = bits == 4                   ? 8
                             : bits == 8 || bits == e2m1 ? 4
                                                         : 0;

// A block of 16 matrix rows: lane r of a word has some columns of row r. Of 4 bits, these are four even ones and the
// four odd ones beside them. Of 8 bits, two words of even columns and two of odd ones have 16 columns together. Of
// other widths, the first words are of even columns, the others of odd ones.
template <int bits>
struct TurnedCodes {
  __m512i words[width_of(bits) == 4 && !are_in_blocks(bits) ? 1 : 2][block_words];
};

// 64 bytes of each row, of which some are there.
template <int bits>
MOEFLUX_INLINE void load_codes(const SpacedRows& rows, int64_t there, __m512i (&v)[code_rows]) {
  if (there >= 64) {
    MOEFLUX_UNROLL
    for (int64_t r = 0; r < code_rows; ++r) v[r] = load<__m512i>(rows.row(r));
  } else {
    const __mmask64 bytes = (uint64_t{1} << greater(there, 0)) - 1;
    MOEFLUX_UNROLL
    for (int64_t r = 0; r < code_rows; ++r) v[r] = _mm512_maskz_loadu_epi8(bytes, rows.row(r));
  }
  if constexpr (bits == 8) {
    MOEFLUX_UNROLL
    for (int64_t r = 0; r < code_rows; ++r) v[r] = even_before_odd(v[r]);
  }
}

// A block of the rows, of which `left` columns are there.
template <int bits>
MOEFLUX_INLINE void turn_codes(const SpacedRows& rows, int64_t half, int64_t left, TurnedCodes<bits>& to) {
  if constexpr (few_rows<bits> > 0) {
    const int64_t bytes = left * width_of(bits) / 8;
    SpacedRows from = rows;
    int64_t at = 0;
    MOEFLUX_UNROLL
    for (auto& words : to.words) {
      load_codes<bits>(from, bytes - at, words);
      turn(words);
      from.first += 64;
      at += 64;
    }
  } else {
    const uint8_t* from[code_rows];  // a loop finds them faster in memory
    for (int64_t r = 0; r < code_rows; ++r) from[r] = rows.row(r);
    for (int64_t r = 0; r < code_rows; ++r) {
      const BlockCodes codes = codes_at<bits>(from[r], half, left);
      to.words[0][r] = codes.even;
      to.words[1][r] = codes.odd;
    }
    for (auto& words : to.words) {
      __m512i v[code_rows];
      MOEFLUX_UNROLL
      for (int64_t r = 0; r < code_rows; ++r) v[r] = words[r];
      turn(v);
      MOEFLUX_UNROLL
      for (int64_t r = 0; r < code_rows; ++r) words[r] = v[r];
    }
  }
}

// The k-th four even columns, and the odd ones beside them.
template <int bits>
MOEFLUX_INLINE BlockCodes word_of(const TurnedCodes<bits>& codes, int64_t k) {
  if constexpr (bits == 4 || bits == e2m1) {
    return halves_of_bytes<bits>(codes.words[0][k]);
  } else if constexpr (bits == 8) {
    const __m512i* of_16 = codes.words[k / 8] + k / 2 % 4 * 4 + k % 2;
    return {of_16[0], of_16[2]};
  } else {
    return {codes.words[0][k], codes.words[1][k]};
  }
}

// What is prefetched while a block is multiplied: some lines far ahead, in the order of memory, and what follows in
// each row.
struct Asked {
  const uint8_t* far;
  SpacedRows next;
};

// The prefetches that go with the k-th words of a block, each tied to one of these.
template <int bits>
MOEFLUX_INLINE void ask(const Asked& asked, int64_t k, BlockCodes& codes) {
  constexpr int64_t lines = bytes_of_128(bits) / 4;  // as many as 16 blocks have
  for (int64_t i = k * lines / code_rows; i < (k + 1) * lines / code_rows; ++i)
    asm volatile("prefetcht1 %1" : "+v"(codes.even) : "m"(asked.far[i * 64]));
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < lines_of_block<bits>; ++i)
    asm volatile("prefetcht0 %1" : "+v"(codes.odd) : "m"(asked.next.row(k)[-i * 64]));
}

// total[i] + the part of the groups of a block, for `n` rows of x, each of which may have several chains.
template <int bits, int64_t group_size, int64_t n, bool asks>
MOEFLUX_INLINE void add_products(const TurnedCodes<bits>& codes, const Scales& scales, const DigitRow* x, int64_t b,
                                 const Asked& asked, Floats* total) {
  constexpr int64_t block_groups = int16_block / group_size;
  constexpr int64_t words = group_size / 8;  // of a group
  constexpr int64_t row_chains = chains_of<bits, group_size>;
  const int64_t first = b * block_groups;
  BlocksForAll<n> blocks;
  alignas(32) Lifts<group_size> lifts[n];
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < n; ++i) {
    blocks.set(i, x[i].digits + b * int16_block_bytes);
    lifts_of<bits, group_size>(x[i].whole_sums + first, lifts[i]);
  }
  MOEFLUX_UNROLL
  for (int64_t g = 0; g < block_groups; ++g) {
    GroupSums<n> sums;
    MOEFLUX_UNROLL
    for (int64_t k = g * words; k < (g + 1) * words; ++k) {
      BlockCodes word = word_of<bits>(codes, k);
      if constexpr (asks) ask<bits>(asked, k, word);
      sums.add(blocks, k, word);
    }
    const int64_t at = (first + g) % scale_groups;
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < n; ++i) {
      const __m512i sum = sums.of(i);
      const Floats scale = load<Floats>(scales.scales[at]);
      const Floats unit = splat(x[i].units[first + g]);
      Floats& of_row = total[i * row_chains + g % row_chains];
      if constexpr (raise_of<bits> > 0) {
        of_row = add_raised_group(of_row, sum, _mm512_set1_epi32(lifts[i][g]), scale, unit);
      } else {
        of_row =
            add_group(of_row, floats(sum), scale, load<Floats>(scales.biases[at]), unit, splat(x[i].sums[first + g]));
      }
    }
  }
}

// The same for `n` rows of x, at most `max`.
template <int bits, int64_t group_size, bool asks, int64_t max = rows_together>
MOEFLUX_INLINE void add_some(const TurnedCodes<bits>& codes, const Scales& scales, const DigitRow* x, int64_t n,
                             int64_t b, const Asked& asked, Floats* total) {
  if constexpr (max > 1) {
    if (n < max) return add_some<bits, group_size, asks, max - 1>(codes, scales, x, n, b, asked, total);
  }
  const TurnedCodes<bits>* from = &codes;
  asm("" : "+r"(from));  // otherwise the compiler takes all bytes apart once, and stores the halves
  add_products<bits, group_size, max, asks>(*from, scales, x, b, asked, total);
}

// 16 rows of the matrix, of which some are there at least. `few` is the number of rows of x, or 0 for any number.
template <int bits, int64_t group_size, int64_t few>
static void multiply_sixteen(const Weights& w, int64_t row, int64_t last, const uint8_t* const* x, float* const* out,
                             int64_t n, const ReadNext& next) {
  constexpr int64_t block_bytes = bytes_of_128(bits);  // of one row
  constexpr int64_t block_groups = int16_block / group_size;
  constexpr int64_t max_rows = few > 0 ? few : max_block;
  if constexpr (few > 0) n = few;
  const int64_t groups = w.columns / group_size;
  const int64_t blocks = int16_blocks(w.columns);
  const int64_t scale_step = code_rows * w.scale_stride / blocks;
  const SixteenRows sixteen = sixteen_rows(row, last);
  const ReadNext target = prefetch_target(w, row, last, next);
  SpacedRows rows = spaced_rows(w.codes + sixteen.first * w.code_stride, w.code_stride);
  const int64_t parts = divide_up(n, rows_together);
  DigitRow from[max_rows];
  constexpr int64_t row_chains = chains_of<bits, group_size>;
  Floats total[max_rows * row_chains];
  for (int64_t i = 0; i < n; ++i) {
    from[i] = digit_row(x[i], w.columns, group_size);
  }
  for (int64_t i = 0; i < n * row_chains; ++i) total[i] = Floats{};
  Scales scales;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t g = b * block_groups;
    if (g % scale_groups == 0) {
      load_scales<bits, group_size>(w, sixteen.first, g, smaller(groups - g, scale_groups), scales);
      if constexpr (scale_form<bits, group_size> != ScaleForm::floats) make_scales<bits, group_size>(scales);
    }
    prefetch_scales<group_size>(target, b, scale_step);
    const Asked asked = {target.codes + b * code_rows * block_bytes, next_block<bits>(w, rows, b, blocks)};
    TurnedCodes<bits> codes;
    turn_codes<bits>(rows, b % 2, w.columns - b * int16_block, codes);
    rows.first += block_bytes;
    if constexpr (few > 0) {
      add_products<bits, group_size, few, true>(codes, scales, from, b, asked, total);
    } else {
      int64_t i = divide_up(n, parts);
      add_some<bits, group_size, true>(codes, scales, from, i, b, asked, total);
      for (int64_t part = parts - 1; part > 0; --part) {
        const int64_t count = divide_up(n - i, part);
        add_some<bits, group_size, false>(codes, scales, from + i, count, b, asked, total + i * row_chains);
        i += count;
      }
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    Floats sum = total[i * row_chains];
    if constexpr (row_chains > 1) sum = times_scales_of_rows(sum_of_chains(total + i * row_chains), w, sixteen.first);
    store_wanted(sixteen, out[i], sum);
  }
}

template <int bits, int64_t group_size, int64_t few>
static void multiply_several(const Weights& w, int64_t first, int64_t last, const uint8_t* const* x, float* const* out,
                             int64_t n, const ReadNext& next) {
  if constexpr (few > 2) {
    if (n < few) return multiply_several<bits, group_size, few - 1>(w, first, last, x, out, n, next);
  }
  const auto multiply = n == few ? multiply_sixteen<bits, group_size, few> : multiply_sixteen<bits, group_size, 0>;
  for (; first < last; first += code_rows) multiply(w, first, last, x, out, n, next);
}

template <int bits, int64_t group_size>
static void multiply_groups(const Weights& w, int64_t first, int64_t last, const uint8_t* const* x, float* const* out,
                            int64_t n, const ReadNext& next) {
  if (n > 1) return multiply_several<bits, group_size, few_rows<bits>>(w, first, last, x, out, n, next);
  for (; first < last; first += code_rows) {
    if constexpr (chains_of<bits, group_size> > 1)
      multiply_one_row_by_chains(w, first, last, *x, *out, next);
    else
      multiply_one_row<bits, group_size>(w, first, last, *x, *out, next);
  }
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

}  // namespace moeflux::cpu::MOEFLUX_ISA

#include "kernels/cpu/int16_formats.inl"
