// Attention over blocks of cached rows with the running maximum and sum of an online softmax.
//
// Queries go through a block together, in tiles of a few, so that each key and value is loaded once for a tile. A tile
// never computes a score that its queries may not see: what the shorter ones lack is done query by query.
//
// What a query yields depends on the rows it sees and on nothing else: blocks and spans of the cached rows begin at
// fixed positions, and spans are merged one behind the other, whether a unit went through all of them or each had a
// unit of its own. So a context gives the same bits however its tokens are cut into calls.

#include "kernels/cpu/attention.h"
#include "kernels/cpu/lanes.h"

namespace moeflux::cpu::MOEFLUX_ISA {

constexpr int64_t key_block = 64;       // cached rows whose scores are held at once
constexpr int64_t unit_queries = 64;    // most queries of a unit
constexpr int64_t shortest_span = 512;  // cached rows: below it the merge would show
constexpr int64_t even_spans = 16;      // of that length; then eight of twice it, eight of four times it ...
constexpr int64_t span_octave = 8;
constexpr int64_t longest_octave = 3;  // spans of 8192 rows
constexpr int64_t enough_blocks = 16;  // of queries, to keep the threads busy without cutting the context
constexpr int64_t most_units = 64;     // of a context that is not cut
constexpr int64_t rows_ahead = 8;      // that are asked for before they are met
constexpr int64_t merged_queries = 4;  // of a unit of the merge

// Scores held in registers: half of them where there are 16 registers, half of 32.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int64_t tile_scores = 16;
#else
constexpr int64_t tile_scores = 8;
#endif
constexpr int64_t tile_queries = tile_scores / 2;

// ---- How a task is cut
// --------------------------------------------------------------------------------------------------

// The first cached row of a span. Longer ones further out, but f32 sums over more rows than these would lose bits.
static int64_t span_begin(int64_t span) {
  if (span < even_spans) return span * shortest_span;
  const int64_t octave = smaller((span - even_spans) / span_octave, longest_octave);
  const int64_t length = shortest_span * (even_spans / span_octave) << octave;
  return (shortest_span * even_spans << octave) + (span - even_spans - octave * span_octave) * length;
}

static int64_t spans_of(int64_t keys) {
  int64_t spans = divide_up(smaller(keys, shortest_span * even_spans), shortest_span);
  while (span_begin(spans) < keys) ++spans;
  return spans;
}

struct AttentionPlan {
  int64_t group;        // query heads that share a key head
  int64_t unit_heads;   // of them, in a block of queries
  int64_t head_blocks;  // in a group
  int64_t unit_rows;
  int64_t row_blocks;
  int64_t blocks;  // of queries
  int64_t spans;
  bool split;  // a unit is one block at one span; else it is every so many blocks, each at all spans
  int64_t units;

  int64_t region(int64_t dim) const { return unit_rows * unit_heads * (dim + 2); }  // of one unit in the scratch
};

static AttentionPlan attention_plan(const AttentionTask& task) {
  AttentionPlan plan;
  plan.group = task.heads / task.kv_heads;
  plan.unit_heads = smaller(plan.group, unit_queries);
  plan.head_blocks = divide_up(plan.group, plan.unit_heads);
  plan.unit_rows = smaller(task.rows, unit_queries / plan.unit_heads);
  plan.row_blocks = divide_up(task.rows, plan.unit_rows);
  plan.blocks = task.kv_heads * plan.head_blocks * plan.row_blocks;
  plan.spans = spans_of(task.first_position + task.rows);
  plan.split = plan.spans > 1 && plan.blocks < enough_blocks &&
               plan.spans * plan.blocks * plan.region(task.dim) <= attention_scratch_bound(task.dim);
  plan.units = plan.split ? plan.spans * plan.blocks : smaller(plan.blocks, most_units);
  return plan;
}

// A block of queries. Query r * heads + h is row first_row + r, head first_head + h.
struct QueryBlock {
  int64_t first_row;
  int64_t first_head;
  int64_t kv_head;
  int64_t heads;
  int64_t count;
};

static QueryBlock query_block(const AttentionTask& task, const AttentionPlan& plan, int64_t block) {
  QueryBlock queries;
  queries.kv_head = block / plan.head_blocks % task.kv_heads;
  const int64_t head = block % plan.head_blocks * plan.unit_heads;  // in the group
  queries.first_head = queries.kv_head * plan.group + head;
  queries.heads = smaller(plan.unit_heads, plan.group - head);
  // The last rows see most and are begun first.
  const int64_t row_block = plan.row_blocks - 1 - block / plan.head_blocks / task.kv_heads;
  queries.first_row = row_block * plan.unit_rows;
  queries.count = smaller(plan.unit_rows, task.rows - queries.first_row) * queries.heads;
  return queries;
}

// ---- Scores
// -------------------------------------------------------------------------------------------------------------

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

// Where the keys or values of one key head are.
template <typename Element>
struct CachedRows {
  const Element* first;
  int64_t stride;
  int64_t dim;

  const Element* row(int64_t i) const { return first + i * stride; }
};

// What a span left of a query beside its values: the greatest score, and the sum of the weights relative to it.
struct SpanEnds {
  float maximum;
  float total;
};

// A block of queries at a span.
template <typename Element>
struct AttentionUnit {
  CachedRows<Element> k;
  CachedRows<Element> k_pe;
  CachedRows<Element> v;
  float scale;
  int64_t end;    // of the cached rows
  int64_t count;  // queries
  const float* q[unit_queries];
  const float* q_pe[unit_queries];
  float* values[unit_queries];  // weighted so far, [dim] each
  int64_t keys[unit_queries];   // that a query sees
  SpanEnds ends[unit_queries];  // so far
  float scores[unit_queries * key_block];
};

// Scores of a tile's queries at `keys` rows.
template <int64_t queries, int64_t keys, typename Element>
MOEFLUX_INLINE void score_tile(AttentionUnit<Element>& unit, int64_t query, int64_t row, float* scores) {
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
  float* scores = unit.scores + query * key_block - block;
  int64_t row = from;
  for (; row + keys <= to; row += keys) {
    // The first tile meets the rows where they come from; one head's are too short and too far apart for the hardware.
    if (query == 0) {
      prefetch(unit.k, row + rows_ahead, keys, unit.end);
      if (unit.v.first != unit.k.first) prefetch(unit.v, row, keys, to);
    }
    score_tile<queries, keys>(unit, query, row, scores + row);
  }
  for (; row < to; ++row) score_tile<queries, 1>(unit, query, row, scores + row);
}

// ---- Weights
// ------------------------------------------------------------------------------------------------------------

// Turns a query's `count` scores into weights relative to the greatest score so far; what came before is brought down
// to it.
template <typename Element>
MOEFLUX_INLINE void weigh(AttentionUnit<Element>& unit, int64_t query, int64_t count) {
  float* scores = unit.scores + query * key_block;
  const int64_t padded = divide_up(count, lanes) * lanes;
  for (int64_t i = count; i < padded; ++i) scores[i] = minus_infinity;
  SpanEnds& ends = unit.ends[query];
  Floats greatest = splat(ends.maximum);
  for (int64_t i = 0; i < padded; i += lanes) greatest = max(greatest, load<Floats>(scores + i));
  const float maximum = largest(greatest);
  // Scores that are all minus infinity weigh nothing; subtracting their maximum would make NaN of them.
  const Floats offset = splat(maximum == minus_infinity ? 0.0f : maximum);
  Floats total = {};
  for (int64_t i = 0; i < padded; i += lanes) {
    const Floats weights = exp(load<Floats>(scores + i) - offset);
    store(scores + i, weights);
    total += weights;
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

// ---- Values
// -------------------------------------------------------------------------------------------------------------

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

// ---- A span
// -------------------------------------------------------------------------------------------------------------

// Both passes over rows `from` to `to` for `queries` queries together.
template <bool scoring, int64_t queries, typename Element>
MOEFLUX_INLINE void pass_rows(AttentionUnit<Element>& unit, int64_t query, int64_t block, int64_t from, int64_t to) {
  if (from >= to) return;
  if constexpr (scoring)
    score_rows<queries>(unit, query, block, from, to);
  else
    add_rows<queries>(unit, query, block, from, to);
}

// Rows that the whole tile sees go through together, the others one query at a time.
template <bool scoring, int64_t queries, typename Element>
static void pass_tile(AttentionUnit<Element>& unit, int64_t query, int64_t block, int64_t end) {
  int64_t common = end;
  for (int64_t i = 0; i < queries; ++i) common = smaller(common, unit.keys[query + i]);
  pass_rows<scoring, queries>(unit, query, block, block, common);
  const int64_t from = greater(common, block);
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
static void attend(AttentionUnit<Element>& unit, int64_t begin) {
  for (int64_t query = 0; query < unit.count; ++query) {
    unit.ends[query] = {minus_infinity, 0};
    __builtin_memset(unit.values[query], 0, static_cast<size_t>(unit.v.dim) * sizeof(float));
  }
  for (int64_t block = begin; block < unit.end; block += key_block) {
    const int64_t block_end = smaller(block + key_block, unit.end);
    pass<true>(unit, block, block_end);
    for (int64_t query = 0; query < unit.count; ++query) {
      const int64_t seen = smaller(block_end, unit.keys[query]) - block;
      if (seen > 0) weigh(unit, query, seen);
    }
    pass<false>(unit, block, block_end);
  }
}

// ---- Spans
// --------------------------------------------------------------------------------------------------------------

// Adds what a span gave to what the ones before it gave. Not inline: wherever it is called from, the same roundings.
[[gnu::noinline]] static void merge_span(float* values, SpanEnds& ends, const float* more, const SpanEnds& more_ends,
                                         int64_t dim) {
  const float maximum = more_ends.maximum > ends.maximum ? more_ends.maximum : ends.maximum;
  const Floats offset = splat(maximum == minus_infinity ? 0.0f : maximum);
  const Floats kept = splat(exp(splat(ends.maximum) - offset)[0]);
  const Floats added = splat(exp(splat(more_ends.maximum) - offset)[0]);
  int64_t c = 0;
  for (; c + lanes <= dim; c += lanes)
    store(values + c, fma(added, load<Floats>(more + c), load<Floats>(values + c) * kept));
  if (c < dim)
    store_some(values + c, fma(added, load_part(more + c, dim - c), load_part(values + c, dim - c) * kept), dim - c);
  ends = {maximum, fma(added, splat(more_ends.total), splat(ends.total) * kept)[0]};
}

static void finish_query(float* values, const SpanEnds& ends, int64_t dim) {
  const float inverse = 1.0f / ends.total;
  for (int64_t c = 0; c < dim; ++c) values[c] *= inverse;
}

// Where a split task keeps what one span gave one block: the values of its queries, then their ends.
struct SpanRegion {
  float* values;
  SpanEnds* ends;
};

static SpanRegion span_region(const AttentionTask& task, const AttentionPlan& plan, int64_t span, int64_t block) {
  float* region = task.scratch + (span * plan.blocks + block) * plan.region(task.dim);
  return {region, reinterpret_cast<SpanEnds*>(region + plan.unit_rows * plan.unit_heads * task.dim)};
}

// ---- A unit
// -------------------------------------------------------------------------------------------------------------

MOEFLUX_INLINE float* out_of(const AttentionTask& task, const QueryBlock& queries, int64_t query) {
  const int64_t row = queries.first_row + query / queries.heads;
  return task.out + (row * task.heads + queries.first_head + query % queries.heads) * task.dim;
}

template <typename Element>
static void begin_block(const AttentionTask& task, const QueryBlock& queries, AttentionUnit<Element>& unit) {
  const int64_t width = task.kv_heads * task.dim;
  const int64_t head_offset = queries.kv_head * task.dim;
  unit.k = {static_cast<const Element*>(task.k) + head_offset, width, task.dim};
  unit.v = {static_cast<const Element*>(task.v) + head_offset, width, task.dim};
  unit.k_pe = {static_cast<const Element*>(task.k_pe), task.pe_dim, task.pe_dim};
  unit.scale = task.scale;
  unit.count = queries.count;
  for (int64_t i = 0; i < queries.count; ++i) {
    const int64_t row = queries.first_row + i / queries.heads;
    const int64_t head = queries.first_head + i % queries.heads;
    unit.q[i] = task.q + row * task.q_row_stride + head * task.q_head_stride;
    unit.q_pe[i] = task.pe_dim > 0 ? task.q_pe + row * task.q_pe_row_stride + head * task.q_pe_head_stride : nullptr;
    unit.keys[i] = task.first_position + row + 1;
  }
}

// One block at one span of a split task.
template <typename Element>
static void split_unit(const AttentionTask& task, const AttentionPlan& plan, int64_t span, int64_t block) {
  AttentionUnit<Element> unit;
  begin_block(task, query_block(task, plan, block), unit);
  const SpanRegion region = span_region(task, plan, span, block);
  for (int64_t i = 0; i < unit.count; ++i) unit.values[i] = region.values + i * task.dim;
  unit.end = smaller(span_begin(span + 1), unit.keys[unit.count - 1]);
  attend(unit, span_begin(span));
  __builtin_memcpy(region.ends, unit.ends, static_cast<size_t>(unit.count) * sizeof(SpanEnds));
}

// One block at every span, one behind the other. The first goes straight to its place.
template <typename Element>
static void whole_block(const AttentionTask& task, const AttentionPlan& plan, int64_t block, float* region) {
  const QueryBlock queries = query_block(task, plan, block);
  AttentionUnit<Element> unit;
  begin_block(task, queries, unit);
  for (int64_t i = 0; i < unit.count; ++i) unit.values[i] = out_of(task, queries, i);
  const int64_t most_keys = unit.keys[unit.count - 1];
  unit.end = smaller(shortest_span, most_keys);
  attend(unit, 0);
  SpanEnds ends[unit_queries];
  __builtin_memcpy(ends, unit.ends, static_cast<size_t>(unit.count) * sizeof(SpanEnds));
  for (int64_t span = 1; span_begin(span) < most_keys; ++span) {
    for (int64_t i = 0; i < unit.count; ++i) unit.values[i] = region + i * task.dim;
    unit.end = smaller(span_begin(span + 1), most_keys);
    attend(unit, span_begin(span));
    for (int64_t i = 0; i < unit.count; ++i)
      if (unit.keys[i] > span_begin(span))
        merge_span(out_of(task, queries, i), ends[i], unit.values[i], unit.ends[i], task.dim);
  }
  for (int64_t i = 0; i < unit.count; ++i) finish_query(out_of(task, queries, i), ends[i], task.dim);
}

template <typename Element>
static void attention_unit(const AttentionTask& task, int64_t index) {
  const AttentionPlan plan = attention_plan(task);
  if (plan.split) return split_unit<Element>(task, plan, plan.spans - 1 - index / plan.blocks, index % plan.blocks);
  float* region = plan.spans > 1 ? task.scratch + index * plan.region(task.dim) : nullptr;
  for (int64_t block = index; block < plan.blocks; block += plan.units) whole_block<Element>(task, plan, block, region);
}

static void merge_query(const AttentionTask& task, const AttentionPlan& plan, int64_t row, int64_t head) {
  const int64_t kv_head = head / plan.group;
  const int64_t head_block = head % plan.group / plan.unit_heads;
  const int64_t row_block = row / plan.unit_rows;
  const int64_t block = ((plan.row_blocks - 1 - row_block) * task.kv_heads + kv_head) * plan.head_blocks + head_block;
  const QueryBlock queries = query_block(task, plan, block);
  const int64_t query = (row - queries.first_row) * queries.heads + head - queries.first_head;
  float* out = task.out + (row * task.heads + head) * task.dim;

  const SpanRegion first = span_region(task, plan, 0, block);
  SpanEnds ends = first.ends[query];
  __builtin_memcpy(out, first.values + query * task.dim, static_cast<size_t>(task.dim) * sizeof(float));
  for (int64_t span = 1; span_begin(span) <= task.first_position + row; ++span) {
    const SpanRegion region = span_region(task, plan, span, block);
    merge_span(out, ends, region.values + query * task.dim, region.ends[query], task.dim);
  }
  finish_query(out, ends, task.dim);
}

// ---- The table's entries
// ------------------------------------------------------------------------------------------------

static int64_t attention_scratch(const AttentionTask& task) {
  const AttentionPlan plan = attention_plan(task);
  return plan.spans > 1 ? plan.units * plan.region(task.dim) : 0;
}

static int64_t attention_units(const AttentionTask& task) { return attention_plan(task).units; }

static void attention_run(const AttentionTask& task, int64_t unit) {
  if (task.bf16)
    attention_unit<uint16_t>(task, unit);
  else
    attention_unit<float>(task, unit);
}

static int64_t attention_merge_units(const AttentionTask& task) {
  return attention_plan(task).split ? divide_up(task.rows * task.heads, merged_queries) : 0;
}

static void attention_merge(const AttentionTask& task, int64_t unit) {
  const AttentionPlan plan = attention_plan(task);
  const int64_t end = smaller((unit + 1) * merged_queries, task.rows * task.heads);
  for (int64_t i = unit * merged_queries; i < end; ++i) merge_query(task, plan, i / task.heads, i % task.heads);
}

constexpr AttentionKernels attention_kernels = {attention_scratch, attention_units, attention_run,
                                                attention_merge_units, attention_merge};

}  // namespace moeflux::cpu::MOEFLUX_ISA
