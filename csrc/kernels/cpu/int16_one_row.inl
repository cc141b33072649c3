// Products of digits and codes (see int16.h) with AVX-512 VNNI, for one row of x.
#include "kernels/cpu/int16_sums.inl"

namespace moeflux::cpu::MOEFLUX_ISA {

// ---- Sixteen rows of the matrix ------------------------------------------------------------------------------------

// add_group where codes are raised. `lift` is what the sum has too much for that.
MOEFLUX_INLINE Floats add_raised_group(Floats total, __m512i sum, __m512i lift, Floats scale, Floats unit) {
  return fma(floats(_mm512_sub_epi32(sum, lift)), scale * unit, total);
}

// Of a block's groups, what their sums have too much because codes are raised.
template <int64_t group_size>
using Lifts = int32_t[int16_block / group_size];

template <int bits, int64_t group_size>
MOEFLUX_INLINE void lifts_of(const int32_t* whole_sums, Lifts<group_size>& lifts) {
  if constexpr (raise_of<bits> > 0) {
    for (int64_t g = 0; g < int16_block / group_size; ++g) lifts[g] = raise_of<bits> * whole_sums[g];
    asm("" : "+m"(lifts));  // from memory, all lanes get one of them for nothing
  }
}

// total + a block's part, for the groups from `g` on. Those after the last group have units and sums of 0.
template <int bits, int64_t group_size>
MOEFLUX_INLINE Floats add_block(Floats total, const BlockSums<group_size>& sums, const Scales& scales,
                                const DigitRow& x, int64_t g) {
  const auto at = [&](int i) { return (g + i) % scale_groups; };
  if constexpr (raise_of<bits> > 0) {
    alignas(32) Lifts<group_size> lifts;
    lifts_of<bits, group_size>(x.whole_sums + g, lifts);
    MOEFLUX_UNROLL
    for (int i = 0; i < int16_block / group_size; ++i) {
      total = add_raised_group(total, sums[i], _mm512_set1_epi32(lifts[i]),
                               scale_at<bits, group_size>(scales, at(i), i % 4), splat(x.units[g + i]));
    }
  } else {
    MOEFLUX_UNROLL
    for (int i = 0; i < int16_block / group_size; ++i) {
      total = add_group(total, floats(sums[i]), scale_at<bits, group_size>(scales, at(i), i % 4),
                        bias_at<bits, group_size>(scales, at(i), i % 4), splat(x.units[g + i]), splat(x.sums[g + i]));
    }
  }
  return total;
}

// ---- NVFP4 ---------------------------------------------------------------------------------------------------------
//
// Each of the eight groups of a block is a chain of its own over the blocks, and the eight are added up at the end. So
// with one row of x, groups remain lanes, as the sums of two rows have them. A quarter has two groups of a row, and the
// same two of the next.

template <int bits, int64_t group_size>
constexpr int64_t chains_of = bits == e2m1 && group_size == 16 ? int16_block / group_size : 1;

// The sum of a row's chains, times the scale of the row. Groups had 256ths of scales, for twice the numbers.
MOEFLUX_INLINE Floats times_scales_of_rows(Floats total, const Weights& w, int64_t row) {
  return total * 128.0f * scales_of_rows(w, row);
}

// Units of a block's groups, and what is taken off their sums because codes are raised.
struct GroupLanes {
  Floats units;
  __m512i start;
};

MOEFLUX_INLINE GroupLanes group_lanes(const DigitRow& x, int64_t g) {
  const __m512i twice = _mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3);
  const __m256i least = _mm256_mullo_epi32(load<__m256i>(x.whole_sums + g), _mm256_set1_epi32(-raise_of<e2m1>));
  const __m512i units = _mm512_castsi256_si512(load<__m256i>(x.units + g));
  return {(Floats)_mm512_maskz_permutexvar_epi64(0xff, twice, units),
          _mm512_maskz_permutexvar_epi64(0xff, twice, _mm512_castsi256_si512(least))};
}

// 256ths of two rows' scales E4M3 of a block, of which `count` are there, or all if it is `whole`.
template <bool whole>
MOEFLUX_INLINE Floats scales_of_two(const uint8_t* first, const uint8_t* second, int64_t count) {
  const auto eight = [&](const uint8_t* from) __attribute__((always_inline)) {
    return whole ? _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))
                 : _mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << count) - 1), from);
  };
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_unpacklo_epi16(eight(first), eight(second)));
  const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(~0x4000)));
  return from_f16((Halves)halves);
}

// total[i] + the block's parts of rows 2 * i and 2 * i + 1.
template <bool whole>
MOEFLUX_INLINE void add_chains(const uint8_t* digits, const SpacedRows& rows, int64_t left, const uint8_t* target,
                               const uint8_t* scales, int64_t scale_stride, const GroupLanes& x,
                               Floats (&total)[code_rows / 2]) {
  sums_of_block<e2m1, Order::parity, whole>(
      digits, rows, 0, left, target, rows, [&](const auto& sums_of_two) __attribute__((always_inline)) {
        MOEFLUX_UNROLL
        for (int64_t r = 0; r < code_rows; r += 2) {
          const Floats sum = floats(sums_of_two(r, x.start));
          const Floats scale = scales_of_two<whole>(scales, scales + scale_stride, left / 16);
          total[r / 2] = fma(sum, scale * x.units, total[r / 2]);
          scales += 2 * scale_stride;
          asm("" : "+r"(scales));  // otherwise the compiler makes sixteen addresses
        }
      });
}

// The same for the last block of a row that ends within it.
[[gnu::noinline]] static void add_part_of_chains(const uint8_t* digits, const SpacedRows& rows, int64_t left,
                                                 const uint8_t* target, const uint8_t* scales, int64_t scale_stride,
                                                 const GroupLanes& x, Floats (&total)[code_rows / 2]) {
  add_chains<false>(digits, rows, left, target, scales, scale_stride, x, total);
}

// Adds up the chains of 16 rows, first those of neighbouring groups.
MOEFLUX_INLINE Floats sum_of_chains(const Floats (&total)[code_rows / 2]) {
  Floats four[4];
  MOEFLUX_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m512 a = (__m512)total[2 * i];
    const __m512 b = (__m512)total[2 * i + 1];
    four[i] =
        (Floats)_mm512_maskz_shuffle_ps(all_lanes, a, b, 0x88) + (Floats)_mm512_maskz_shuffle_ps(all_lanes, a, b, 0xdd);
  }
  const auto halves = [](Floats a, Floats b) {
    return (Floats)quarters<0x88>((__m512i)a, (__m512i)b) + (Floats)quarters<0xdd>((__m512i)a, (__m512i)b);
  };
  return halves(halves(four[0], four[1]), halves(four[2], four[3]));
}

// The same where each chain is a vector.
MOEFLUX_INLINE Floats sum_of_chains(const Floats* total) {
  return ((total[0] + total[1]) + (total[2] + total[3])) + ((total[4] + total[5]) + (total[6] + total[7]));
}

// ---- Prefetching ---------------------------------------------------------------------------------------------------

constexpr int first_cache = 3;  // in the terms of __builtin_prefetch
constexpr int second_cache = 2;

// Prefetches a cache line at an address that may lie after the matrix.
template <int cache = first_cache>
MOEFLUX_INLINE void prefetch_line(const uint8_t* from, int64_t offset) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(from) + offset), 0, cache);
}

constexpr int64_t min_prefetch_distance = 16384;  // bytes of codes between what is prefetched and what is multiplied

// The memory that is prefetched while sixteen rows from `row` on are computed: rows so many bytes of codes further on,
// at least the next sixteen, or, after the last row, what is read next.
MOEFLUX_INLINE ReadNext prefetch_target(const Weights& w, int64_t row, int64_t last, const ReadNext& next,
                                        int64_t bytes = min_prefetch_distance) {
  // Rows that are all the same (see multiply_few) have no stride.
  const int64_t distance = divide_up(bytes, greater(code_rows * w.code_stride, 1)) * code_rows;
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
  const ReadNext target = prefetch_target(w, row, last, next, come_in_order<bits> ? 1 : min_prefetch_distance);
  const DigitRow from = digit_row(x, w.columns, group_size);
  SpacedRows rows = spaced_rows(w.codes + sixteen.first * w.code_stride, w.code_stride);
  Floats total = {};
  Scales scales;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t g = b * block_groups;
    if (g % scale_groups == 0)
      load_scales<bits, group_size>(w, sixteen.first, g, smaller(groups - g, scale_groups), scales);
    prefetch_scales<group_size>(target, b, scale_step);
    const uint8_t* digits = from.digits + b * int16_block_bytes;
    const uint8_t* codes = target.codes + b * code_rows * block_bytes;
    const SpacedRows ahead = next_block<bits>(w, rows, b, blocks);
    BlockSums<group_size> sums;
    if (const int64_t left = w.columns - b * int16_block; left >= int16_block)
      group_sums_of_block<bits, group_size, true>(digits, rows, b % 2, left, codes, ahead, sums);
    else
      sums_of_part<bits, group_size>(digits, rows, b % 2, left, codes, ahead, sums);
    rows.first += block_bytes;
    total = add_block<bits, group_size>(total, sums, scales, from, g);
  }
  store_wanted(sixteen, out, total);
}

// The same for NVFP4.
static void multiply_one_row_by_chains(const Weights& w, int64_t row, int64_t last, const uint8_t* x, float* out,
                                       const ReadNext& next) {
  constexpr int64_t block_bytes = bytes_of_128(e2m1);  // of one row
  constexpr int64_t block_groups = int16_block / 16;
  const int64_t blocks = int16_blocks(w.columns);
  const int64_t scale_step = code_rows * w.scale_stride / blocks;
  const SixteenRows sixteen = sixteen_rows(row, last);
  const ReadNext target = prefetch_target(w, row, last, next, 1);
  const DigitRow from = digit_row(x, w.columns, 16);
  SpacedRows rows = spaced_rows(w.codes + sixteen.first * w.code_stride, w.code_stride);
  const uint8_t* scales = w.scales + sixteen.first * w.scale_stride + w.row_scale_bytes;
  Floats total[code_rows / 2] = {};
  for (int64_t b = 0; b < blocks; ++b) {
    prefetch_scales<16>(target, b, scale_step);
    const uint8_t* digits = from.digits + b * int16_block_bytes;
    const uint8_t* codes = target.codes + b * code_rows * block_bytes;
    const GroupLanes of_x = group_lanes(from, b * block_groups);
    if (const int64_t left = w.columns - b * int16_block; left >= int16_block) {
      add_chains<true>(digits, rows, left, codes, scales, w.scale_stride, of_x, total);
    } else {
      Floats parts[code_rows / 2];  // whose address may be known to others
      __builtin_memcpy(parts, total, sizeof parts);
      add_part_of_chains(digits, rows, left, codes, scales, w.scale_stride, of_x, parts);
      __builtin_memcpy(total, parts, sizeof parts);
    }
    rows.first += block_bytes;
    scales += block_groups;
  }
  store_wanted(sixteen, out, times_scales_of_rows(sum_of_chains(total), w, sixteen.first));
}

}  // namespace moeflux::cpu::MOEFLUX_ISA
