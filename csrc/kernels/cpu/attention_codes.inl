// Attention over cached rows of codes in whole numbers, with AVX-512 VNNI: 2 products of 16 bits per lane and
// instruction.
//
// Queries become whole numbers of 16 bits, and so do the weights that scores become, times the scales of the values. A
// query has one unit, and so have its weights at a block of rows: the largest is 32767 units. Codes are multiplied as
// they are; they are widened once for all queries of a tile.
//
// What a query yields depends on the rows it sees and on nothing else: sums of whole numbers are exact in any order,
// blocks begin at fixed positions, and rows that a query does not see weigh zero.
#include "kernels/cpu/attention_spans.inl"

namespace moeflux::cpu::MOEFLUX_ISA {

constexpr int64_t key_block = 64;  // cached rows whose weights share a unit
constexpr int64_t block_vectors = key_block / lanes;
constexpr int64_t code_sums = 16;    // registers of sums
constexpr int64_t code_queries = 8;  // most that share what was widened
static_assert(cached_block % key_block == 0 && max_coded_channels % coded_step == 0);

// Asks for `left` cached rows, some lines between any two steps of products: many at once would have to wait for one
// another. They go to the second cache; the first has no room for a block of keys and one of values.
struct LinesAhead {
  const int8_t* row;
  int64_t stride;
  int64_t dim;
  int64_t left;
  int64_t c = 0;

  LinesAhead(const CachedRows<int8_t>& rows, int64_t first, int64_t count)
      : row(rows.row(first)), stride(rows.stride), dim(rows.dim), left(count) {}

  [[gnu::always_inline]] void ask(int64_t lines) {
    for (; lines > 0 && left > 0; --lines) {
      __builtin_prefetch(row + c, 0, 2);
      c += 64;
      if (c < dim) continue;
      c = 0;
      row += stride;
      --left;
    }
  }
};

// A block of queries at a span.
struct CodeUnit {
  static constexpr int64_t together = 1;

  void begin(const AttentionTask& task, const QueryBlock& queries);
  void attend(int64_t first);
  void enter(int64_t block);

  CachedRows<int8_t> k;
  CachedRows<int8_t> k_pe;
  CachedRows<int8_t> v;
  RowScales k_scales;
  RowScales pe_scales;
  RowScales v_scales;
  int64_t end;                  // of the cached rows
  int64_t count;                // queries
  float* values[unit_queries];  // weighted so far, [dim] each
  int64_t keys[unit_queries];   // that a query sees: rows starts ... keys - 1
  int64_t starts[unit_queries];
  SpanEnds ends[unit_queries];  // so far
  float q_units[unit_queries];  // times the scale of scores, as the next
  float pe_units[unit_queries];
  float weight_units[unit_queries];
  alignas(64) int16_t q[unit_queries][max_coded_channels];
  alignas(64) int32_t scores[unit_queries][key_block];
  alignas(64) int32_t pe_scores[unit_queries][key_block];
  alignas(64) int16_t weights[unit_queries][key_block];
};

// sum += a[2i] * b[2i] + a[2i + 1] * b[2i + 1] in each lane i.
MOEFLUX_INLINE Ints add_pairs(Ints sum, __m512i a, __m512i b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}

MOEFLUX_INLINE __m512i widened(const int8_t* from) { return _mm512_cvtepi8_epi16(load<__m256i>(from)); }

// ---- Whole numbers ---------------------------------------------------------------------------------------------

constexpr float largest_whole = 32767;
static_assert(int64_t{32767} * 128 * max_coded_dim < int64_t{1} << 31 && key_block <= max_coded_dim);  // of any sum

struct WholeUnit {
  float unit;
  float inverse;
};

// The unit of numbers of which `largest` has, in one of its lanes, the bits of the greatest in size.
MOEFLUX_INLINE WholeUnit unit_of(Words largest) {
  constexpr int32_t min_bits = 27 << 23;  // 2^-100, so that neither the unit nor its inverse leaves the normal numbers
  const int32_t largest_bits = reduce_whole<false>((__m512i)largest);
  const int32_t bits = largest_bits > min_bits ? largest_bits : min_bits;
  float size;
  __builtin_memcpy(&size, &bits, sizeof size);
  return {largest_bits >= 0x7f800000 ? __builtin_nanf("") : size / largest_whole, largest_whole / size};
}

MOEFLUX_INLINE Words size_bits(Floats value) { return (Words)value & 0x7fffffffu; }

MOEFLUX_INLINE void store_whole(int16_t* to, Floats value, float inverse) {
  const __m512i whole = _mm512_maskz_cvtps_epi32(all_lanes, (__m512)(value * splat(inverse)));
  store(to, _mm512_maskz_cvtsepi32_epi16(all_lanes, whole));
}

// A query's `dim` numbers. Returns the unit.
static float whole_numbers(const float* from, int64_t dim, int16_t* to) {
  Words largest = {};
  for (int64_t c = 0; c < dim; c += lanes) {
    const Words bits = size_bits(load<Floats>(from + c));
    largest = bits > largest ? bits : largest;
  }
  const WholeUnit unit = unit_of(largest);
  for (int64_t c = 0; c < dim; c += lanes) store_whole(to + c, load<Floats>(from + c), unit.inverse);
  return unit.unit;
}

void CodeUnit::begin(const AttentionTask& task, const QueryBlock& queries) {
  const int64_t width = task.kv_heads * task.dim;
  k = cached_rows<int8_t>(task, task.k_offset, queries.kv_head, width, task.dim);
  v = cached_rows<int8_t>(task, task.v_offset, queries.kv_head, width, task.dim);
  k_pe = cached_rows<int8_t>(task, task.pe_offset, 0, task.pe_dim, task.pe_dim);
  k_scales = row_scales(task, task.k_offset, queries.kv_head, width);
  v_scales = row_scales(task, task.v_offset, queries.kv_head, width);
  pe_scales = row_scales(task, task.pe_offset, 0, task.pe_dim);
  count = queries.count;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = queries.first_row + i / queries.heads;
    const int64_t head = queries.first_head + i % queries.heads;
    keys[i] = task.first_position + row + 1;
    starts[i] = first_seen(task, row);
    const float* from = task.q + row * task.q_row_stride + head * task.q_head_stride;
    q_units[i] = task.scale * whole_numbers(from, task.dim, q[i]);
    if (task.pe_dim == 0) continue;
    const float* pe_from = task.q_pe + row * task.q_pe_row_stride + head * task.q_pe_head_stride;
    pe_units[i] = task.scale * whole_numbers(pe_from, task.pe_dim, q[i] + task.dim);
  }
}

// ---- Scores ----------------------------------------------------------------------------------------------------

// Scores of a tile's queries at rows `row` and behind, as many as there are sums for, of channels that are `offset`
// behind the first of a query.
template <int64_t queries>
MOEFLUX_INLINE void score_tile(const int16_t (*q)[max_coded_channels], int64_t offset, const CachedRows<int8_t>& k,
                               int64_t row, LinesAhead& ahead, int32_t* scores) {
  constexpr int64_t keys = code_sums / queries;
  Ints sum[code_sums] = {};
  for (int64_t c = 0; c < k.dim; c += coded_step) {
    __m512i key[keys];
    MOEFLUX_UNROLL
    for (int64_t j = 0; j < keys; ++j) key[j] = widened(k.row(row + j) + c);
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < queries; ++i) {
      const __m512i query = load<__m512i>(q[i] + offset + c);
      MOEFLUX_UNROLL
      for (int64_t j = 0; j < keys; ++j) sum[i * keys + j] = add_pairs(sum[i * keys + j], query, key[j]);
    }
    ahead.ask(keys / 2);
  }
  int32_t tile[code_sums];
  store(tile, sums<lanes>(sum));
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < queries; ++i)
    __builtin_memcpy(scores + i * key_block, tile + i * keys, keys * sizeof(int32_t));
}

// Scores of a tile's queries at the `seen` first rows of a block, and at some behind them, which nobody reads.
template <int64_t queries>
static void score_rows(CodeUnit& unit, int64_t query, int64_t block, int64_t seen, LinesAhead& ahead) {
  const int16_t (*q)[max_coded_channels] = unit.q + query;
  for (int64_t row = 0; row < seen; row += code_sums / queries) {
    score_tile<queries>(q, 0, unit.k, block + row, ahead, unit.scores[query] + row);
    if (unit.k_pe.dim > 0)
      score_tile<queries>(q, unit.k.dim, unit.k_pe, block + row, ahead, unit.pe_scores[query] + row);
  }
}

// ---- Weights ---------------------------------------------------------------------------------------------------

// A bit for each of the first rows of a block.
MOEFLUX_INLINE uint64_t low_rows(int64_t count) {
  return count < key_block ? (uint64_t{1} << count) - 1 : ~uint64_t{0};
}

// Turns a query's scores at rows `hidden` ... `seen` - 1 of a block into weights relative to the greatest score so far,
// and scales down what came before.
static void weigh(CodeUnit& unit, int64_t query, int64_t block, int64_t hidden, int64_t seen) {
  Floats scores[block_vectors];
  __mmask16 there[block_vectors];
  SpanEnds& ends = unit.ends[query];
  Floats greatest = splat(ends.maximum);
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < block_vectors; ++i) {
    there[i] = static_cast<__mmask16>((low_rows(seen) & ~low_rows(hidden)) >> i * lanes);
    const auto part = [&](const int32_t* whole, float q_unit, const RowScales& scales) __attribute__((always_inline)) {
      const Floats sums = (Floats)_mm512_maskz_cvtepi32_ps(all_lanes, load<__m512i>(whole + i * lanes));
      return sums * splat(q_unit) * load_bf16(scales.first + block + i * lanes);
    };
    Floats score = part(unit.scores[query], unit.q_units[query], unit.k_scales);
    if (unit.k_pe.dim > 0) score += part(unit.pe_scores[query], unit.pe_units[query], unit.pe_scales);
    scores[i] = (Floats)_mm512_mask_mov_ps((__m512)splat(minus_infinity), there[i], (__m512)score);
    greatest = max(greatest, scores[i]);
  }
  const float maximum = largest(greatest);
  // Scores that are all minus infinity weigh nothing; subtracting their maximum would make NaN of them.
  const Floats offset = splat(maximum == minus_infinity ? 0.0f : maximum);
  Floats total = {};
  Words size = {};
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < block_vectors; ++i) {
    const Floats weights = exp(scores[i] - offset);
    total += weights;
    const Floats scales = load_bf16(unit.v_scales.first + block + i * lanes);
    scores[i] = (Floats)_mm512_maskz_mul_ps(there[i], (__m512)weights, (__m512)scales);
    const Words bits = size_bits(scores[i]);
    size = bits > size ? bits : size;
  }
  const WholeUnit whole = unit_of(size);
  unit.weight_units[query] = whole.unit;
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < block_vectors; ++i) store_whole(unit.weights[query] + i * lanes, scores[i], whole.inverse);
  float kept = 1;
  if (ends.maximum != maximum) {
    kept = exp(splat(ends.maximum) - offset)[0];
    float* values = unit.values[query];
    for (int64_t c = 0; c < unit.v.dim; c += lanes) store(values + c, load<Floats>(values + c) * kept);
  }
  ends = {maximum, ends.total * kept + sum(total)};
}

// For a query whose tile goes on without it. Zeros times minus zero leave every bit of its values.
MOEFLUX_COLD void weigh_nothing(CodeUnit& unit, int64_t query) {
  unit.weight_units[query] = -0.0f;
  __builtin_memset(unit.weights[query], 0, sizeof unit.weights[query]);
}

// ---- Values ----------------------------------------------------------------------------------------------------

MOEFLUX_INLINE void add_sums(float* values, Ints sums, float unit) {
  const Floats numbers = (Floats)_mm512_maskz_cvtepi32_ps(all_lanes, (__m512i)sums);
  store(values, fma(splat(unit), numbers, load<Floats>(values)));
}

// `steps` times 32 channels of a tile's values, from channel c on.
template <int64_t queries, int64_t steps>
MOEFLUX_INLINE void add_values(CodeUnit& unit, int64_t query, int64_t c, int64_t block, int64_t seen,
                               LinesAhead& ahead) {
  Ints sums[queries][2 * steps] = {};
  for (int64_t row = 0; row < seen; row += 2) {
    const int8_t* v = unit.v.row(block + row) + c;
    // Pairs of two rows' codes: the 4 first channels of every 8, then the 4 others.
    __m512i pairs[2 * steps];
    MOEFLUX_UNROLL
    for (int64_t s = 0; s < steps; ++s) {
      const __m512i even = widened(v + s * coded_step);
      const __m512i odd = widened(v + unit.v.stride + s * coded_step);
      pairs[2 * s] = _mm512_unpacklo_epi16(even, odd);
      pairs[2 * s + 1] = _mm512_unpackhi_epi16(even, odd);
    }
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < queries; ++i) {
      int32_t two;
      __builtin_memcpy(&two, unit.weights[query + i] + row, sizeof two);
      const __m512i everywhere = _mm512_set1_epi32(two);
      MOEFLUX_UNROLL
      for (int64_t s = 0; s < 2 * steps; ++s) sums[i][s] = add_pairs(sums[i][s], pairs[s], everywhere);
    }
    ahead.ask(steps);
  }
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < queries; ++i) {
    const float whole = unit.weight_units[query + i];
    float* values = unit.values[query + i] + c;
    MOEFLUX_UNROLL
    for (int64_t s = 0; s < steps; ++s) {
      const Ints a = sums[i][2 * s];
      const Ints b = sums[i][2 * s + 1];
      add_sums(values + s * coded_step,
               __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23), whole);
      add_sums(values + s * coded_step + lanes,
               __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31), whole);
    }
  }
}

template <int64_t queries>
static void add_rows(CodeUnit& unit, int64_t query, int64_t block, int64_t seen, LinesAhead& ahead) {
  constexpr int64_t steps = code_sums / queries / 2;
  int64_t c = 0;
  for (; c + steps * coded_step <= unit.v.dim; c += steps * coded_step)
    add_values<queries, steps>(unit, query, c, block, seen, ahead);
  if constexpr (steps > 1)
    for (; c < unit.v.dim; c += coded_step) add_values<queries, 1>(unit, query, c, block, seen, ahead);
}

// ---- A span ----------------------------------------------------------------------------------------------------

template <bool scoring, int64_t queries>
static void pass_tiles(CodeUnit& unit, int64_t& query, int64_t from, int64_t block, int64_t block_end,
                       LinesAhead& ahead) {
  for (; query + queries <= unit.count; query += queries) {
    const int64_t seen = smaller(block_end, unit.keys[query + queries - 1]) - from;  // by the last, which sees most
    if (seen <= 0 || unit.starts[query] >= block_end) continue;
    if constexpr (scoring)
      score_rows<queries>(unit, query, block, seen, ahead);
    else
      add_rows<queries>(unit, query, block, seen, ahead);
  }
}

template <bool scoring>
static void pass(CodeUnit& unit, int64_t from, int64_t block, int64_t block_end, LinesAhead& ahead) {
  int64_t query = 0;
  pass_tiles<scoring, code_queries>(unit, query, from, block, block_end, ahead);
  pass_tiles<scoring, 4>(unit, query, from, block, block_end, ahead);
  pass_tiles<scoring, 2>(unit, query, from, block, block_end, ahead);
  pass_tiles<scoring, 1>(unit, query, from, block, block_end, ahead);
}

void CodeUnit::enter(int64_t block) {
  k.enter(block);
  k_pe.enter(block);
  v.enter(block);
  k_scales.enter(block);
  pe_scales.enter(block);
  v_scales.enter(block);
}

// The rows of one span, from nothing.
void CodeUnit::attend(int64_t first) {
  for (int64_t query = 0; query < count; ++query) {
    ends[query] = {minus_infinity, 0};
    __builtin_memset(values[query], 0, static_cast<size_t>(v.dim) * sizeof(float));
  }
  first = greater(first, starts[0] / key_block * key_block);  // the first query sees the earliest rows
  if (first < end) enter(first / cached_block);
  for (int64_t from = first; from < end; from += key_block) {
    const int64_t block_end = smaller(from + key_block, end);
    const int64_t block = from % cached_block;
    if (block == 0) enter(from / cached_block);
    LinesAhead ahead(v, block, v.offset == k.offset ? 0 : block_end - from);
    pass<true>(*this, from, block, block_end, ahead);
    for (int64_t query = 0; query < count; ++query) {
      const int64_t hidden = greater(starts[query] - from, 0);
      const int64_t seen = smaller(block_end, keys[query]) - from;
      if (seen > hidden)
        weigh(*this, query, block, hidden, seen);
      else
        weigh_nothing(*this, query);
    }
    CachedRows<int8_t> next = k;
    const int64_t there = smaller(end - block_end, key_block);
    if (there > 0 && block_end % cached_block == 0) next.enter(block_end / cached_block);
    ahead = LinesAhead(next, block_end % cached_block, there);
    pass<false>(*this, from, block, block_end, ahead);
  }
}

constexpr AttentionKernels code_attention = attention_table<1>(attention_unit<CodeUnit>);

}  // namespace moeflux::cpu::MOEFLUX_ISA
