// Attention over blocks of cached rows with the running maximum and sum of an online softmax.
//
// Queries go through a block together, in tiles of a few, so that each key and value is loaded once for a tile. A tile
// never computes a score that its queries may not see: what the shorter ones lack is done query by query.

#include "kernels/cpu/attention.h"
#include "kernels/cpu/lanes.h"

namespace moeflux::cpu::MOEFLUX_ISA {

constexpr int64_t key_block = 64;       // cached rows whose scores are held at once
constexpr int64_t unit_queries = 64;    // most queries of a unit
constexpr int64_t shortest_span = 256;  // cached rows: below it the merge would show
constexpr int64_t split_units = 64;     // no more spans than make this many units
constexpr int64_t rows_ahead = 8;       // that are asked for before they are met
constexpr int64_t merged_queries = 4;   // of a unit of the merge

// Scores held in registers: half of them where there are 16 registers, half of 32.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int64_t tile_scores = 16;
#else
constexpr int64_t tile_scores = 8;
#endif
constexpr int64_t tile_queries = tile_scores / 2;

// ---- How a task is cut
// --------------------------------------------------------------------------------------------------

struct AttentionPlan {
  int64_t group;        // query heads that share a key head
  int64_t unit_heads;   // of them, in a unit
  int64_t head_blocks;  // in a group
  int64_t unit_rows;
  int64_t row_blocks;
  int64_t span;  // cached rows
  int64_t spans;
  int64_t blocks;  // of queries: units of one span

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
  const int64_t keys = task.first_position + task.rows;
  const int64_t wanted = smaller(divide_up(keys, shortest_span), split_units / plan.blocks);
  plan.span = divide_up(divide_up(keys, greater(wanted, 1)), key_block) * key_block;
  plan.spans = divide_up(keys, plan.span);
  return plan;
}

// The queries of a unit. Query r * heads + h is row first_row + r, head first_head + h.
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

// What one unit works on.
template <typename Element>
struct AttentionUnit {
  CachedRows<Element> k;
  CachedRows<Element> k_pe;
  CachedRows<Element> v;
  float scale;
  int64_t end;    // of the cached rows that are its own
  int64_t count;  // queries
  const float* q[unit_queries];
  const float* q_pe[unit_queries];
  float* values[unit_queries];  // weighted so far, [dim] each
  int64_t keys[unit_queries];   // that a query sees
  float maximum[unit_queries];  // of its scores so far
  float total[unit_queries];    // of its weights so far
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
  Floats greatest = splat(unit.maximum[query]);
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
  if (unit.maximum[query] != maximum) {
    kept = exp(splat(unit.maximum[query]) - offset)[0];
    float* values = unit.values[query];
    int64_t c = 0;
    for (; c + lanes <= unit.v.dim; c += lanes) store(values + c, load<Floats>(values + c) * kept);
    for (; c < unit.v.dim; ++c) values[c] *= kept;
  }
  unit.total[query] = unit.total[query] * kept + sum(total);
  unit.maximum[query] = maximum;
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

// ---- A unit
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

template <typename Element>
static void attend(AttentionUnit<Element>& unit, int64_t begin) {
  for (int64_t query = 0; query < unit.count; ++query) {
    unit.maximum[query] = minus_infinity;
    unit.total[query] = 0;
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

template <typename Element>
static void attention_unit(const AttentionTask& task, int64_t index) {
  const AttentionPlan plan = attention_plan(task);
  const QueryBlock queries = query_block(task, plan, index % plan.blocks);
  const int64_t dim = task.dim;
  const int64_t width = task.kv_heads * dim;
  const int64_t head_offset = queries.kv_head * dim;
  const bool split = plan.spans > 1;
  float* region = split ? task.scratch + index * plan.region(dim) : nullptr;

  AttentionUnit<Element> unit;
  unit.k = {static_cast<const Element*>(task.k) + head_offset, width, dim};
  unit.v = {static_cast<const Element*>(task.v) + head_offset, width, dim};
  unit.k_pe = {static_cast<const Element*>(task.k_pe), task.pe_dim, task.pe_dim};
  unit.scale = task.scale;
  unit.count = queries.count;
  int64_t most_keys = 0;
  for (int64_t i = 0; i < queries.count; ++i) {
    const int64_t row = queries.first_row + i / queries.heads;
    const int64_t head = queries.first_head + i % queries.heads;
    unit.q[i] = task.q + row * task.q_row_stride + head * task.q_head_stride;
    unit.q_pe[i] = task.pe_dim > 0 ? task.q_pe + row * task.q_pe_row_stride + head * task.q_pe_head_stride : nullptr;
    unit.values[i] = split ? region + i * dim : task.out + (row * task.heads + head) * dim;
    unit.keys[i] = task.first_position + row + 1;
    most_keys = greater(most_keys, unit.keys[i]);
  }

  const int64_t begin = index / plan.blocks * plan.span;
  unit.end = smaller(begin + plan.span, most_keys);
  attend(unit, begin);

  for (int64_t i = 0; i < queries.count; ++i) {
    if (split) {
      float* ends = region + plan.unit_rows * plan.unit_heads * dim + 2 * i;
      ends[0] = unit.maximum[i];
      ends[1] = unit.total[i];
    } else {
      const float inverse = 1.0f / unit.total[i];
      for (int64_t c = 0; c < dim; ++c) unit.values[i][c] *= inverse;
    }
  }
}

// ---- The merge of spans
// -------------------------------------------------------------------------------------------------

static void merge_query(const AttentionTask& task, const AttentionPlan& plan, int64_t row, int64_t head) {
  const int64_t dim = task.dim;
  const int64_t kv_head = head / plan.group;
  const int64_t head_block = head % plan.group / plan.unit_heads;
  const int64_t row_block = row / plan.unit_rows;
  const int64_t block = ((plan.row_blocks - 1 - row_block) * task.kv_heads + kv_head) * plan.head_blocks + head_block;
  const QueryBlock queries = query_block(task, plan, block);
  const int64_t query = (row - queries.first_row) * queries.heads + head - queries.first_head;
  const int64_t spans = divide_up(task.first_position + row + 1, plan.span);  // that the row sees
  const int64_t stride = plan.blocks * plan.region(dim);
  const float* region = task.scratch + block * plan.region(dim);
  const float* ends = region + plan.unit_rows * plan.unit_heads * dim + 2 * query;

  float maximum = minus_infinity;
  for (int64_t s = 0; s < spans; ++s) maximum = ends[s * stride] > maximum ? ends[s * stride] : maximum;
  const Floats offset = splat(maximum == minus_infinity ? 0.0f : maximum);
  float weights[split_units];
  float total = 0;
  for (int64_t s = 0; s < spans; ++s) {
    weights[s] = exp(splat(ends[s * stride]) - offset)[0];
    total += weights[s] * ends[s * stride + 1];
  }
  const float inverse = 1.0f / total;

  const float* values = region + query * dim;
  float* out = task.out + (row * task.heads + head) * dim;
  int64_t c = 0;
  for (; c + lanes <= dim; c += lanes) {
    Floats merged = {};
    for (int64_t s = 0; s < spans; ++s) merged = fma(splat(weights[s]), load<Floats>(values + s * stride + c), merged);
    store(out + c, merged * inverse);
  }
  for (; c < dim; ++c) {
    float merged = 0;
    for (int64_t s = 0; s < spans; ++s) merged += weights[s] * values[s * stride + c];
    out[c] = merged * inverse;
  }
}

// ---- The table's entries
// ------------------------------------------------------------------------------------------------

static int64_t attention_scratch(const AttentionTask& task) {
  const AttentionPlan plan = attention_plan(task);
  return plan.spans > 1 ? plan.spans * plan.blocks * plan.region(task.dim) : 0;
}

static int64_t attention_units(const AttentionTask& task) {
  const AttentionPlan plan = attention_plan(task);
  return plan.spans * plan.blocks;
}

static void attention_run(const AttentionTask& task, int64_t unit) {
  if (task.bf16)
    attention_unit<uint16_t>(task, unit);
  else
    attention_unit<float>(task, unit);
}

static int64_t attention_merge_units(const AttentionTask& task) {
  return attention_plan(task).spans > 1 ? divide_up(task.rows * task.heads, merged_queries) : 0;
}

static void attention_merge(const AttentionTask& task, int64_t unit) {
  const AttentionPlan plan = attention_plan(task);
  const int64_t end = smaller((unit + 1) * merged_queries, task.rows * task.heads);
  for (int64_t i = unit * merged_queries; i < end; ++i) merge_query(task, plan, i / task.heads, i % task.heads);
}

constexpr AttentionKernels attention_kernels = {attention_scratch, attention_units, attention_run,
                                                attention_merge_units, attention_merge};

}  // namespace moeflux::cpu::MOEFLUX_ISA
