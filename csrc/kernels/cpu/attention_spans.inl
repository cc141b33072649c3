// How attention is cut into units of work, whoever computes them: blocks of queries, and spans of the cached rows that
// are merged one after the other.
//
// Spans begin at fixed positions and are merged in order, whether one unit went through all of them or each had a unit
// of its own. So a context gives the same bits however its tokens are cut into calls.
#pragma once

#include "kernels/cpu/attention.h"
#include "kernels/cpu/lanes.h"

namespace moeflux::cpu::MOEFLUX_ISA {

constexpr int64_t unit_queries = 64;    // most queries of a unit
constexpr int64_t shortest_span = 512;  // cached rows: below it the merge would show
constexpr int64_t even_spans = 16;      // of that length; then eight of twice it, eight of four times it ...
constexpr int64_t span_octave = 8;
constexpr int64_t longest_octave = 3;  // spans of 8192 rows
constexpr int64_t enough_blocks = 16;  // of queries, to keep the threads busy without cutting the context
constexpr int64_t max_units = 64;      // of a context that is not cut
constexpr int64_t merged_queries = 4;  // of a unit of the merge
static_assert(shortest_span % cached_block == 0);

// ---- How a task is cut -----------------------------------------------------------------------------------------

// The first cached row of a span. Spans are longer further out, but f32 sums over still more rows would lose bits.
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

static int64_t span_of(int64_t key) { return spans_of(key + 1) - 1; }

// The first cached row that a row of the task sees.
static int64_t first_seen(const AttentionTask& task, int64_t row) {
  return task.window > 0 ? greater(task.first_position + row + 1 - task.window, 0) : 0;
}

struct AttentionPlan {
  int64_t group;        // query heads that share a key head
  int64_t unit_heads;   // of them, in a block of queries
  int64_t head_blocks;  // in a group
  int64_t unit_rows;
  int64_t row_blocks;
  int64_t blocks;  // of queries
  int64_t first_span;
  int64_t spans;  // from there on
  bool split;     // a unit is one block at one span; else it is every so many blocks, each at all spans
  int64_t units;

  int64_t region(int64_t dim) const { return unit_rows * unit_heads * (dim + 2); }  // of one unit in the scratch
};

// `together` heads of a row go through a unit together: fewer take as much room.
template <int64_t together>
static AttentionPlan attention_plan(const AttentionTask& task) {
  AttentionPlan plan;
  plan.group = task.heads / task.kv_heads;
  plan.unit_heads = smaller(plan.group, unit_queries);
  plan.head_blocks = divide_up(plan.group, plan.unit_heads);
  plan.unit_rows = smaller(task.rows, unit_queries / (divide_up(plan.unit_heads, together) * together));
  plan.row_blocks = divide_up(task.rows, plan.unit_rows);
  plan.blocks = task.kv_heads * plan.head_blocks * plan.row_blocks;
  plan.first_span = span_of(first_seen(task, 0));
  plan.spans = spans_of(task.first_position + task.rows) - plan.first_span;
  plan.split = plan.spans > 1 && plan.blocks < enough_blocks &&
               plan.spans * plan.blocks * plan.region(task.dim) <= attention_scratch_bound(task.dim);
  plan.units = plan.split ? plan.spans * plan.blocks : smaller(plan.blocks, max_units);
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

// Where the keys or values of one key head are. They are met a block at a time, and row 0 is the first of the block
// that was entered.
template <typename Element>
struct CachedRows {
  const std::byte* const* blocks;
  int64_t offset;  // in a block: bytes
  int64_t stride;
  int64_t dim;
  const Element* first = nullptr;

  void enter(int64_t block) { first = reinterpret_cast<const Element*>(blocks[block] + offset); }
  const Element* row(int64_t i) const { return first + i * stride; }
};

// Of one key head, or of all where `head` is 0.
template <typename Element>
static CachedRows<Element> cached_rows(const AttentionTask& task, int64_t offset, int64_t head, int64_t width,
                                       int64_t dim) {
  return {task.blocks, offset + head * dim * static_cast<int64_t>(sizeof(Element)), width, dim};
}

// The scales of one key head's codes, in the block that was entered.
struct RowScales {
  const std::byte* const* blocks;
  int64_t offset;
  const uint16_t* first = nullptr;  // bf16

  void enter(int64_t block) { first = reinterpret_cast<const uint16_t*>(blocks[block] + offset); }
};

MOEFLUX_INLINE RowScales row_scales(const AttentionTask& task, int64_t offset, int64_t head, int64_t width) {
  return {task.blocks, offset + cached_block * width + head * cached_block * 2};
}

// What a span left of a query beside its values: the greatest score, and the sum of the weights relative to it.
struct SpanEnds {
  float maximum;
  float total;
};

// ---- Spans -----------------------------------------------------------------------------------------------------

// Adds what a span gave to what the spans before it gave. Not inline, so that it rounds the same wherever it is called.
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

// Divides what all spans gave a query of that head by the sum of its weights. Not inline, as above.
[[gnu::noinline]] static void finish_query(const AttentionTask& task, int64_t head, float* values,
                                           const SpanEnds& ends) {
  float factor = 1.0f / ends.total;
  if (task.sinks) {
    const float sink = task.sinks[head];
    const float maximum = sink > ends.maximum ? sink : ends.maximum;
    const Floats kept = exp(splat(ends.maximum - maximum));
    factor = (kept / fma(splat(ends.total), kept, exp(splat(sink - maximum))))[0];
  }
  for (int64_t c = 0; c < task.dim; ++c) values[c] *= factor;
}

// Where a split task keeps what one span gave one block: the values of its queries, then their ends.
struct SpanRegion {
  float* values;
  SpanEnds* ends;
};

static SpanRegion span_region(const AttentionTask& task, const AttentionPlan& plan, int64_t span, int64_t block) {
  float* region = task.scratch + ((span - plan.first_span) * plan.blocks + block) * plan.region(task.dim);
  return {region, reinterpret_cast<SpanEnds*>(region + plan.unit_rows * plan.unit_heads * task.dim)};
}

// ---- A unit ----------------------------------------------------------------------------------------------------
// A Unit is a block of queries at a span:
//   begin(task, queries)  takes the block;
//   attend(first)         goes through cached rows first ... end - 1;
//   count, keys, end      its queries, how many cached rows each sees, and the end of the span;
//   values, ends          where attend leaves the weighted values of each query, and their ends;
//   together              heads of a row that it takes together.

MOEFLUX_INLINE int64_t row_of(const QueryBlock& queries, int64_t query) {
  return queries.first_row + query / queries.heads;
}

MOEFLUX_INLINE int64_t head_of(const QueryBlock& queries, int64_t query) {
  return queries.first_head + query % queries.heads;
}

MOEFLUX_INLINE float* out_of(const AttentionTask& task, const QueryBlock& queries, int64_t query) {
  return task.out + (row_of(queries, query) * task.heads + head_of(queries, query)) * task.dim;
}

// One block at one span of a split task.
template <typename Unit>
static void split_unit(const AttentionTask& task, const AttentionPlan& plan, int64_t span, int64_t block) {
  Unit unit;
  unit.begin(task, query_block(task, plan, block));
  const SpanRegion region = span_region(task, plan, span, block);
  for (int64_t i = 0; i < unit.count; ++i) unit.values[i] = region.values + i * task.dim;
  unit.end = smaller(span_begin(span + 1), unit.keys[unit.count - 1]);
  unit.attend(span_begin(span));
  __builtin_memcpy(region.ends, unit.ends, static_cast<size_t>(unit.count) * sizeof(SpanEnds));
}

// One block at every span, one after the other. The first goes straight to its place.
template <typename Unit>
static void whole_block(const AttentionTask& task, const AttentionPlan& plan, int64_t block, float* region) {
  const QueryBlock queries = query_block(task, plan, block);
  Unit unit;
  unit.begin(task, queries);
  for (int64_t i = 0; i < unit.count; ++i) unit.values[i] = out_of(task, queries, i);
  const int64_t max_keys = unit.keys[unit.count - 1];
  const int64_t first_span = span_of(first_seen(task, queries.first_row));
  unit.end = smaller(span_begin(first_span + 1), max_keys);
  unit.attend(span_begin(first_span));
  SpanEnds ends[unit_queries];
  __builtin_memcpy(ends, unit.ends, static_cast<size_t>(unit.count) * sizeof(SpanEnds));
  for (int64_t span = first_span + 1; span_begin(span) < max_keys; ++span) {
    for (int64_t i = 0; i < unit.count; ++i) unit.values[i] = region + i * task.dim;
    unit.end = smaller(span_begin(span + 1), max_keys);
    unit.attend(span_begin(span));
    for (int64_t i = 0; i < unit.count; ++i) {
      if (unit.keys[i] <= span_begin(span)) continue;
      float* out = out_of(task, queries, i);
      if (first_seen(task, row_of(queries, i)) < span_begin(span)) {
        merge_span(out, ends[i], unit.values[i], unit.ends[i], task.dim);
      } else {  // the first span that it sees
        __builtin_memcpy(out, unit.values[i], static_cast<size_t>(task.dim) * sizeof(float));
        ends[i] = unit.ends[i];
      }
    }
  }
  for (int64_t i = 0; i < unit.count; ++i) finish_query(task, head_of(queries, i), out_of(task, queries, i), ends[i]);
}

template <typename Unit>
static void attention_unit(const AttentionTask& task, int64_t index) {
  const AttentionPlan plan = attention_plan<Unit::together>(task);
  if (plan.split) {
    const int64_t span = plan.first_span + plan.spans - 1 - index / plan.blocks;
    return split_unit<Unit>(task, plan, span, index % plan.blocks);
  }
  float* region = plan.spans > 1 ? task.scratch + index * plan.region(task.dim) : nullptr;
  for (int64_t block = index; block < plan.blocks; block += plan.units) whole_block<Unit>(task, plan, block, region);
}

static void merge_query(const AttentionTask& task, const AttentionPlan& plan, int64_t row, int64_t head) {
  const int64_t kv_head = head / plan.group;
  const int64_t head_block = head % plan.group / plan.unit_heads;
  const int64_t row_block = row / plan.unit_rows;
  const int64_t block = ((plan.row_blocks - 1 - row_block) * task.kv_heads + kv_head) * plan.head_blocks + head_block;
  const QueryBlock queries = query_block(task, plan, block);
  const int64_t query = (row - queries.first_row) * queries.heads + head - queries.first_head;
  float* out = task.out + (row * task.heads + head) * task.dim;

  const int64_t first_span = span_of(first_seen(task, row));
  const SpanRegion first = span_region(task, plan, first_span, block);
  SpanEnds ends = first.ends[query];
  __builtin_memcpy(out, first.values + query * task.dim, static_cast<size_t>(task.dim) * sizeof(float));
  for (int64_t span = first_span + 1; span_begin(span) <= task.first_position + row; ++span) {
    const SpanRegion region = span_region(task, plan, span, block);
    merge_span(out, ends, region.values + query * task.dim, region.ends[query], task.dim);
  }
  finish_query(task, head, out, ends);
}

// ---- The table's entries ---------------------------------------------------------------------------------------

template <int64_t together>
static int64_t attention_scratch(const AttentionTask& task) {
  const AttentionPlan plan = attention_plan<together>(task);
  return plan.spans > 1 ? plan.units * plan.region(task.dim) : 0;
}

template <int64_t together>
static int64_t attention_units(const AttentionTask& task) {
  return attention_plan<together>(task).units;
}

template <int64_t together>
static int64_t attention_merge_units(const AttentionTask& task) {
  return attention_plan<together>(task).split ? divide_up(task.rows * task.heads, merged_queries) : 0;
}

template <int64_t together>
static void attention_merge(const AttentionTask& task, int64_t unit) {
  const AttentionPlan plan = attention_plan<together>(task);
  const int64_t end = smaller((unit + 1) * merged_queries, task.rows * task.heads);
  for (int64_t i = unit * merged_queries; i < end; ++i) merge_query(task, plan, i / task.heads, i % task.heads);
}

template <int64_t together>
constexpr AttentionKernels attention_table(void (*run)(const AttentionTask& task, int64_t unit)) {
  return {attention_scratch<together>, attention_units<together>, run, attention_merge_units<together>,
          attention_merge<together>};
}

}  // namespace moeflux::cpu::MOEFLUX_ISA
