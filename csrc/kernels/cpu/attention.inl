// Attention in f32 over blocks of cached rows, with the running maximum and sum of an online softmax.
//
// Codes are multiplied as they are: the scale of a key multiplies the score that they gave, and the scale of a value
// the weight that is given to them.
//
// Queries go through a block together, in tiles of a few, so that each key and value is loaded once per tile. A tile
// computes only scores that all its queries may see. The rest is done query by query.
//
// The result of a query depends on the rows that it sees and on nothing else: blocks begin at fixed positions, as spans
// do. Rows before a window are neither met nor read, but for the scales of a few.

#include "kernels/cpu/attention_spans.inl"

namespace moeflux::cpu::MOEFLUX_ISA {

constexpr int64_t key_block = 64;  // cached rows whose scores are held at once
constexpr int64_t rows_ahead = 8;  // that are asked for before they are met
static_assert(cached_block % key_block == 0);

// Scores held in registers: half of them where there are 16 registers, half of 32.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int64_t tile_scores = 16;
#else
constexpr int64_t tile_scores = 8;
#endif
constexpr int64_t tile_queries = tile_scores / 2;

// ---- Scores ----------------------------------------------------------------------------------------------------

// products[query * keys + key] += q . k, lane by lane, as far as whole vectors go.
template <int64_t queries, int64_t keys, typename Element>
MOEFLUX_INLINE void add_products(const float* const* q, const Element* k, int64_t stride, int64_t dim,
                                 Floats* products) {
  for (int64_t c = 0; c + lanes <= dim; c += lanes) {
    Floats key[keys];
    MOEFLUX_UNROLL
    for (int64_t j = 0; j < keys; ++j) key[j] = load_row(k + j * stride + c);
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < queries; ++i) {
      const Floats query = load<Floats>(q[i] + c);
      MOEFLUX_UNROLL
      for (int64_t j = 0; j < keys; ++j) products[i * keys + j] = fma(query, key[j], products[i * keys + j]);
    }
  }
}

// scores[query * keys + key] += q . k * scale for the channels behind the last whole vector.
template <int64_t queries, int64_t keys, typename Element>
MOEFLUX_COLD void add_rest(const float* const* q, const Element* k, int64_t stride, int64_t dim, float scale,
                           float* scores) {
  for (int64_t i = 0; i < queries; ++i)
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t c = dim / lanes * lanes; c < dim; ++c)
        scores[i * keys + j] += q[i][c] * widen(k[j * stride + c]) * scale;
}

// What codes need besides. The positional part has scales of its own, and so scores of its own.
struct CodeScales {
  RowScales k;
  RowScales k_pe;
  RowScales v;
  float pe_scores[unit_queries * key_block];

  void enter(int64_t block) {
    k.enter(block);
    k_pe.enter(block);
    v.enter(block);
  }
};

struct NoScales {
  void enter(int64_t) {}
};

template <typename Element>
struct ScalesOf {
  static constexpr bool are_there = false;
  using Type = NoScales;
};

template <>
struct ScalesOf<int8_t> {
  static constexpr bool are_there = true;
  using Type = CodeScales;
};

// A block of queries at a span.
template <typename Element>
struct AttentionUnit {
  static constexpr int64_t together = 1;

  void begin(const AttentionTask& task, const QueryBlock& queries);
  void attend(int64_t first);
  void enter(int64_t row);

  CachedRows<Element> k;
  CachedRows<Element> k_pe;
  CachedRows<Element> v;
  float scale;
  int64_t end;     // of the cached rows
  int64_t origin;  // the first row of the block that was entered
  int64_t count;   // queries
  const float* q[unit_queries];
  const float* q_pe[unit_queries];
  float* values[unit_queries];  // weighted so far, [dim] each
  int64_t keys[unit_queries];   // that a query sees: rows starts ... keys - 1
  int64_t starts[unit_queries];
  SpanEnds ends[unit_queries];  // so far
  float scores[unit_queries * key_block];
  typename ScalesOf<Element>::Type scales;
};

// Scores of a tile's queries at `keys` rows of one part, without the scales that codes have.
template <int64_t queries, int64_t keys, typename Element>
MOEFLUX_INLINE void score_part(const float* const* q, const CachedRows<Element>& k, int64_t row, float scale,
                               float* scores) {
  constexpr int64_t count = queries * keys < lanes ? lanes : queries * keys;
  Floats products[count] = {};
  add_products<queries, keys>(q, k.row(row), k.stride, k.dim, products);
  float tile[count];
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < count; i += lanes) store(tile + i, sums<lanes>(products + i) * splat(scale));
  if (k.dim % lanes != 0) add_rest<queries, keys>(q, k.row(row), k.stride, k.dim, scale, tile);
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < queries; ++i) __builtin_memcpy(scores + i * key_block, tile + i * keys, keys * sizeof(float));
}

// Scores of a tile's queries at `keys` rows.
template <int64_t queries, int64_t keys, typename Element>
MOEFLUX_INLINE void score_tile(AttentionUnit<Element>& unit, int64_t query, int64_t row, float* scores) {
  if constexpr (ScalesOf<Element>::are_there) {
    score_part<queries, keys>(unit.q + query, unit.k, row, unit.scale, scores);
    if (unit.k_pe.dim > 0)
      score_part<queries, keys>(unit.q_pe + query, unit.k_pe, row, unit.scale,
                                unit.scales.pe_scores + (scores - unit.scores));
    return;
  }
  constexpr int64_t count = queries * keys < lanes ? lanes : queries * keys;
  Floats products[count] = {};
  add_products<queries, keys>(unit.q + query, unit.k.row(row), unit.k.stride, unit.k.dim, products);
  if (unit.k_pe.dim > 0)
    add_products<queries, keys>(unit.q_pe + query, unit.k_pe.row(row), unit.k_pe.stride, unit.k_pe.dim, products);
  float tile[count];
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < count; i += lanes) store(tile + i, sums<lanes>(products + i) * splat(unit.scale));
  if (unit.k.dim % lanes != 0)
    add_rest<queries, keys>(unit.q + query, unit.k.row(row), unit.k.stride, unit.k.dim, unit.scale, tile);
  if (unit.k_pe.dim % lanes != 0)
    add_rest<queries, keys>(unit.q_pe + query, unit.k_pe.row(row), unit.k_pe.stride, unit.k_pe.dim, unit.scale, tile);
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < queries; ++i) __builtin_memcpy(scores + i * key_block, tile + i * keys, keys * sizeof(float));
}

// Asks for `count` rows from `row` on, of those before `end`.
template <typename Element>
MOEFLUX_INLINE void prefetch(const CachedRows<Element>& rows, int64_t row, int64_t count, int64_t end) {
  constexpr int64_t line = 64 / sizeof(Element);
  for (int64_t i = row; i < smaller(row + count, end); ++i)
    for (int64_t c = 0; c < rows.dim; c += line) __builtin_prefetch(rows.row(i) + c);
}

template <int64_t queries, typename Element>
static void score_rows(AttentionUnit<Element>& unit, int64_t query, int64_t block, int64_t from, int64_t to) {
  constexpr int64_t keys = tile_scores / queries;
  const int64_t end = smaller(unit.end - unit.origin, cached_block);
  float* scores = unit.scores + query * key_block - block;
  int64_t row = from;
  for (; row + keys <= to; row += keys) {
    // The first tile meets the rows where they come from; one head's are too short and too far apart for the hardware.
    if (query == 0) {
      prefetch(unit.k, row + rows_ahead, keys, end);
      if (unit.v.offset != unit.k.offset) prefetch(unit.v, row, keys, to);
    }
    score_tile<queries, keys>(unit, query, row, scores + row);
  }
  for (; row < to; ++row) score_tile<queries, 1>(unit, query, row, scores + row);
}

// ---- Weights ---------------------------------------------------------------------------------------------------

// Multiplies scores first ... count - 1 of a query by the scales of the keys' codes. `row` is that of score 0.
MOEFLUX_INLINE void scale_scores(AttentionUnit<int8_t>& unit, int64_t query, int64_t row, int64_t first,
                                 int64_t count) {
  const auto part = [&](float* scores, const RowScales& scales, int64_t i) __attribute__((always_inline)) {
    const int64_t there = count - i;
    return there < lanes ? load_part(scores + i, there) * load_part(scales.first + row + i, there)
                         : load_row(scores + i) * load_row(scales.first + row + i);
  };
  float* scores = unit.scores + query * key_block;
  float* pe_scores = unit.scales.pe_scores + query * key_block;
  for (int64_t i = first; i < count; i += lanes) {
    Floats scaled = part(scores, unit.scales.k, i);
    if (unit.k_pe.dim > 0) scaled += part(pe_scores, unit.scales.k_pe, i);
    store(scores + i, scaled);
  }
}

// Turns a query's `count` scores into weights relative to the greatest score so far, and scales down what came before.
// `row` is the first key's in the block that was entered. The query does not see the first `hidden` keys.
template <typename Element>
MOEFLUX_INLINE void weigh(AttentionUnit<Element>& unit, int64_t query, int64_t row, int64_t hidden, int64_t count) {
  float* scores = unit.scores + query * key_block;
  const int64_t first = hidden / lanes * lanes;
  const int64_t padded = divide_up(count, lanes) * lanes;
  if constexpr (ScalesOf<Element>::are_there) {
    for (int64_t i = first; i < hidden; ++i) scores[i] = 0;
    scale_scores(unit, query, row, first, count);
  }
  for (int64_t i = first; i < hidden; ++i) scores[i] = minus_infinity;
  for (int64_t i = count; i < padded; ++i) scores[i] = minus_infinity;
  SpanEnds& ends = unit.ends[query];
  Floats greatest = splat(ends.maximum);
  for (int64_t i = first; i < padded; i += lanes) greatest = max(greatest, load<Floats>(scores + i));
  const float maximum = largest(greatest);
  // Scores that are all minus infinity weigh nothing; subtracting their maximum would make NaN of them.
  const Floats offset = splat(maximum == minus_infinity ? 0.0f : maximum);
  Floats total = {};
  for (int64_t i = first; i < padded; i += lanes) {
    const Floats weights = exp(load<Floats>(scores + i) - offset);
    total += weights;
    if constexpr (ScalesOf<Element>::are_there)  // behind `count` are scales of rows that nobody reads
      store(scores + i, weights * load_row(unit.scales.v.first + row + i));
    else
      store(scores + i, weights);
  }
  float kept = 1;
  if (ends.maximum != maximum) {
    kept = exp(splat(ends.maximum) - offset)[0];
    float* values = unit.values[query];
    int64_t c = 0;
    for (; c + lanes <= unit.v.dim; c += lanes) store(values + c, load<Floats>(values + c) * kept);
    for (; c < unit.v.dim; ++c) values[c] *= kept;
  }
  ends = {maximum, ends.total * kept + sum(total)};
}

// ---- Values ----------------------------------------------------------------------------------------------------

// `width` vectors of the tile's values, from channel c on.
template <int64_t queries, int64_t width, typename Element>
MOEFLUX_INLINE void add_values(AttentionUnit<Element>& unit, int64_t query, int64_t c, int64_t block, int64_t from,
                               int64_t to) {
  Floats values[queries][width];
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < queries; ++i) {
    MOEFLUX_UNROLL
    for (int64_t w = 0; w < width; ++w) values[i][w] = load<Floats>(unit.values[query + i] + c + w * lanes);
  }
  const float* weights = unit.scores + query * key_block - block;
  for (int64_t row = from; row < to; ++row) {
    const Element* v = unit.v.row(row) + c;
    Floats value[width];
    MOEFLUX_UNROLL
    for (int64_t w = 0; w < width; ++w) value[w] = load_row(v + w * lanes);
    MOEFLUX_UNROLL
    for (int64_t i = 0; i < queries; ++i) {
      const Floats weight = splat(weights[i * key_block + row]);
      MOEFLUX_UNROLL
      for (int64_t w = 0; w < width; ++w) values[i][w] = fma(weight, value[w], values[i][w]);
    }
  }
  MOEFLUX_UNROLL
  for (int64_t i = 0; i < queries; ++i) {
    MOEFLUX_UNROLL
    for (int64_t w = 0; w < width; ++w) store(unit.values[query + i] + c + w * lanes, values[i][w]);
  }
}

template <int64_t queries, typename Element>
static void add_rows(AttentionUnit<Element>& unit, int64_t query, int64_t block, int64_t from, int64_t to) {
  constexpr int64_t width = tile_scores / queries;
  const int64_t dim = unit.v.dim;
  int64_t c = 0;
  for (; c + width * lanes <= dim; c += width * lanes) add_values<queries, width>(unit, query, c, block, from, to);
  for (; c + lanes <= dim; c += lanes) add_values<queries, 1>(unit, query, c, block, from, to);
  for (int64_t i = query; c < dim && i < query + queries; ++i) {
    float* values = unit.values[i] + c;
    Floats added = load_part(values, dim - c);
    for (int64_t row = from; row < to; ++row)
      added = fma(splat(unit.scores[i * key_block + row - block]), load_part(unit.v.row(row) + c, dim - c), added);
    store_some(values, added, dim - c);
  }
}

// ---- A span ----------------------------------------------------------------------------------------------------

// Both passes over rows `from` to `to` for `queries` queries together.
template <bool scoring, int64_t queries, typename Element>
MOEFLUX_INLINE void pass_rows(AttentionUnit<Element>& unit, int64_t query, int64_t block, int64_t from, int64_t to) {
  if (from >= to) return;
  const int64_t origin = unit.origin;
  if constexpr (scoring)
    score_rows<queries>(unit, query, block - origin, from - origin, to - origin);
  else
    add_rows<queries>(unit, query, block - origin, from - origin, to - origin);
}

// Rows that the whole tile sees go through together, the others one query at a time.
template <bool scoring, int64_t queries, typename Element>
static void pass_tile(AttentionUnit<Element>& unit, int64_t query, int64_t block, int64_t end) {
  int64_t begin = block;
  int64_t common = end;
  for (int64_t i = 0; i < queries; ++i) {
    begin = greater(begin, unit.starts[query + i]);
    common = smaller(common, unit.keys[query + i]);
  }
  for (int64_t i = 0; begin > block && i < queries; ++i)
    pass_rows<scoring, 1>(unit, query + i, block, greater(block, unit.starts[query + i]),
                          smaller(begin, smaller(end, unit.keys[query + i])));
  pass_rows<scoring, queries>(unit, query, block, begin, common);
  const int64_t from = greater(common, begin);
  for (int64_t i = 0; i < queries; ++i)
    pass_rows<scoring, 1>(unit, query + i, block, from, smaller(end, unit.keys[query + i]));
}

template <bool scoring, typename Element>
static void pass(AttentionUnit<Element>& unit, int64_t block, int64_t end) {
  int64_t query = 0;
  for (; query + tile_queries <= unit.count; query += tile_queries)
    pass_tile<scoring, tile_queries>(unit, query, block, end);
  if constexpr (tile_queries > 4)
    for (; query + 4 <= unit.count; query += 4) pass_tile<scoring, 4>(unit, query, block, end);
  for (; query + 2 <= unit.count; query += 2) pass_tile<scoring, 2>(unit, query, block, end);
  for (; query < unit.count; ++query) pass_tile<scoring, 1>(unit, query, block, end);
}

// The rows of one span, from nothing.
template <typename Element>
void AttentionUnit<Element>::attend(int64_t first) {
  AttentionUnit& unit = *this;
  for (int64_t query = 0; query < unit.count; ++query) {
    unit.ends[query] = {minus_infinity, 0};
    __builtin_memset(unit.values[query], 0, static_cast<size_t>(unit.v.dim) * sizeof(float));
  }
  first = greater(first, unit.starts[0] / key_block * key_block);  // the first query sees the earliest rows
  if (first < unit.end) unit.enter(first / cached_block * cached_block);
  for (int64_t block = first; block < unit.end; block += key_block) {
    const int64_t block_end = smaller(block + key_block, unit.end);
    if (block % cached_block == 0) unit.enter(block);
    pass<true>(unit, block, block_end);
    for (int64_t query = 0; query < unit.count; ++query) {
      const int64_t hidden = greater(unit.starts[query] - block, 0);
      const int64_t seen = smaller(block_end, unit.keys[query]) - block;
      if (seen > hidden) weigh(unit, query, block - unit.origin, hidden, seen);
    }
    pass<false>(unit, block, block_end);
    if (block_end % cached_block == 0 && block_end < unit.end) {
      CachedRows<Element> next = unit.k;
      next.enter(block_end / cached_block);
      prefetch(next, 0, rows_ahead, unit.end - block_end);
    }
  }
}

template <typename Element>
void AttentionUnit<Element>::enter(int64_t row) {
  origin = row;
  k.enter(row / cached_block);
  v.enter(row / cached_block);
  k_pe.enter(row / cached_block);
  scales.enter(row / cached_block);
}

template <typename Element>
void AttentionUnit<Element>::begin(const AttentionTask& task, const QueryBlock& queries) {
  const int64_t width = task.kv_heads * task.dim;
  k = cached_rows<Element>(task, task.k_offset, queries.kv_head, width, task.dim);
  v = cached_rows<Element>(task, task.v_offset, queries.kv_head, width, task.dim);
  k_pe = cached_rows<Element>(task, task.pe_offset, 0, task.pe_dim, task.pe_dim);
  if constexpr (ScalesOf<Element>::are_there) {
    scales.k = row_scales(task, task.k_offset, queries.kv_head, width);
    scales.v = row_scales(task, task.v_offset, queries.kv_head, width);
    scales.k_pe = row_scales(task, task.pe_offset, 0, task.pe_dim);
  }
  scale = task.scale;
  count = queries.count;
  for (int64_t i = 0; i < queries.count; ++i) {
    const int64_t row = queries.first_row + i / queries.heads;
    const int64_t head = queries.first_head + i % queries.heads;
    q[i] = task.q + row * task.q_row_stride + head * task.q_head_stride;
    q_pe[i] = task.pe_dim > 0 ? task.q_pe + row * task.q_pe_row_stride + head * task.q_pe_head_stride : nullptr;
    keys[i] = task.first_position + row + 1;
    starts[i] = first_seen(task, row);
  }
}

static void attention_run(const AttentionTask& task, int64_t unit) {
  if (task.kind == Rows::codes)
    attention_unit<AttentionUnit<int8_t>>(task, unit);
  else if (task.kind == Rows::bf16)
    attention_unit<AttentionUnit<uint16_t>>(task, unit);
  else
    attention_unit<AttentionUnit<float>>(task, unit);
}

constexpr AttentionKernels attention_kernels = attention_table<1>(attention_run);

}  // namespace moeflux::cpu::MOEFLUX_ISA
