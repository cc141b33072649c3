// Softmax attention over cached rows: grouped queries, and latent attention in its absorbed form.
//
// A simdgroup takes a few queries that share a key head through the keys, 32 at a time: a lane has the score of one
// key, then every 32nd number of the values. Sums begin anew at every span of the cache, and spans are added one behind
// the other, whether one simdgroup went through all of them or each had its own: what a query yields depends on the
// rows that it sees, and not on how the work was cut.
#include "cached.h"

// The weighted values of some keys, not yet divided by the sum. A lane has numbers lane, lane + 32 ...
template <int chunks>
struct Sums {
  float highest;
  float total;
  float values[chunks];
};

template <int chunks>
inline void clear(thread Sums<chunks>& sums) {
  sums.highest = -FLT_MAX;
  sums.total = 0.0f;
  for (int c = 0; c < chunks; c++) sums.values[c] = 0.0f;
}

// What follows is added to what came before. Nothing at all changes no bit.
template <int chunks>
inline void add_sums(thread Sums<chunks>& sums, const thread Sums<chunks>& more) {
  if (more.total == 0.0f) return;
  const float highest = max(sums.highest, more.highest);
  const float before = precise::exp(sums.highest - highest), after = precise::exp(more.highest - highest);
  sums.highest = highest;
  sums.total = fma(sums.total, before, more.total * after);
  for (int c = 0; c < chunks; c++) sums.values[c] = fma(sums.values[c], before, more.values[c] * after);
}

// A score without a value.
template <int chunks>
inline void add_sink(thread Sums<chunks>& sums, float sink) {
  const float highest = max(sums.highest, sink), before = precise::exp(sums.highest - highest);
  sums.total = fma(sums.total, before, precise::exp(sink - highest));
  for (int c = 0; c < chunks; c++) sums.values[c] *= before;
}

// Queries of one key head: rows of the call, and in each the heads that share it.
struct Queries {
  device const float* q[attention_queries];
  device const float* q_pe[attention_queries];
  uint index[attention_queries];  // row * heads + head
  uint begin[attention_queries];  // cached rows begin ... seen - 1
  uint seen[attention_queries];
  uint count;
  uint earliest;  // of `begin`
  uint longest;   // of `seen`
};

inline Queries queries_of(constant AttentionParams& params, device const float* q, device const float* q_pe,
                          uint tile_index, uint kv_head) {
  const uint group = params.heads / params.kv_heads;
  const uint all = params.n * group;
  Queries queries;
  queries.count = min(attention_queries, all - tile_index * attention_queries);
  queries.longest = 0;
  queries.earliest = ~0u;
  for (uint r = 0; r < attention_queries; r++) {
    const uint query = min(tile_index * attention_queries + r, all - 1);
    const uint row = query / group, head = kv_head * group + query % group;
    queries.q[r] = q + ulong(row) * params.q_row_stride + head * params.q_head_stride;
    queries.q_pe[r] = q_pe + ulong(row) * params.q_pe_row_stride + head * params.q_pe_head_stride;
    queries.index[r] = row * params.heads + head;
    queries.seen[r] = uint(params.first_position) + row + 1;
    const uint hidden = params.window > 0 ? queries.seen[r] - min(queries.seen[r], params.window) : 0;
    queries.begin[r] = hidden;
    queries.earliest = min(queries.earliest, hidden);
    queries.longest = max(queries.longest, queries.seen[r]);
  }
  return queries;
}

// Keys begin ... end - 1 of one span. `weights` belongs to the simdgroup.
template <typename T, int chunks>
inline void attend(constant AttentionParams& params, const thread Queries& queries, const thread Cached<T>& cached,
                   uint kv_head, uint begin, uint end, threadgroup float (&weights)[attention_queries][lanes],
                   uint lane, thread Sums<chunks> (&sums)[attention_queries]) {
  device const T* rows = block_of(cached, begin / cached_block);
  device const T* k = rows + params.k_begin / sizeof(T);
  device const T* v = rows + params.v_begin / sizeof(T);
  device const T* k_pe = rows + params.pe_begin / sizeof(T);
  const uint width = params.kv_heads * params.dim;
  for (uint r = 0; r < attention_queries; r++) clear(sums[r]);
  for (uint first = max(begin, queries.earliest / lanes * lanes); first < end; first += lanes) {
    const uint key = first + lane;
    float scores[attention_queries] = {};
    if (key < end) {
      device const T* numbers = k + (ulong(key - begin) * params.kv_heads + kv_head) * params.dim;
      for (uint i = 0; i < params.dim; i++)
        for (uint r = 0; r < attention_queries; r++) scores[r] = fma(queries.q[r][i], float(numbers[i]), scores[r]);
      const float scale = scale_of(k, cached_block, width, kv_head, key - begin);
      for (uint r = 0; r < attention_queries; r++) scores[r] *= scale;
      if (params.pe_dim > 0) {
        const float pe_scale = scale_of(k_pe, cached_block, params.pe_dim, 0, key - begin);
        numbers = k_pe + ulong(key - begin) * params.pe_dim;
        for (uint i = 0; i < params.pe_dim; i++) {
          const float number = float(numbers[i]) * pe_scale;
          for (uint r = 0; r < attention_queries; r++) scores[r] = fma(queries.q_pe[r][i], number, scores[r]);
        }
      }
    }
    for (uint r = 0; r < attention_queries; r++) {
      const bool is_seen = key >= queries.begin[r] && key < queries.seen[r];
      const float score = is_seen ? scores[r] * params.scale : -FLT_MAX;
      const float highest = max(sums[r].highest, simd_max(score));
      const float weight = is_seen ? precise::exp(score - highest) : 0.0f;
      const float before = precise::exp(sums[r].highest - highest);
      sums[r].highest = highest;
      sums[r].total = fma(sums[r].total, before, simd_sum(weight));
      for (int c = 0; c < chunks; c++) sums[r].values[c] *= before;
      weights[r][lane] = weight;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (uint j = 0; j < min(lanes, end - first); j++) {
      device const T* numbers = v + (ulong(first + j - begin) * params.kv_heads + kv_head) * params.dim;
      const float scale = scale_of(v, cached_block, width, kv_head, first + j - begin);
      for (int c = 0; c < chunks; c++) {
        const uint i = lane + uint(c) * lanes;
        const float value = i < params.dim ? float(numbers[i]) * scale : 0.0f;
        for (uint r = 0; r < attention_queries; r++)
          if (first + j >= queries.begin[r] && first + j < queries.seen[r])
            sums[r].values[c] = fma(weights[r][j], value, sums[r].values[c]);
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// A simdgroup through all spans. Grid of threadgroups, a simdgroup each: tiles of queries, key heads.
template <typename T, int chunks>
kernel void attention(constant AttentionParams& params [[buffer(0)]], device const float* q [[buffer(1)]],
                      device const float* q_pe [[buffer(2)]], device const RowBlock* blocks [[buffer(3)]],
                      device const T* first [[buffer(4)]], device const T* second [[buffer(5)]],
                      device const T* third [[buffer(6)]], device const T* fourth [[buffer(7)]],
                      device const float* sinks [[buffer(8)]], device float* out [[buffer(9)]],
                      uint2 at [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float weights[attention_queries][lanes];
  const Cached<T> cached = {blocks, first, second, third, fourth};
  const Queries queries = queries_of(params, q, q_pe, at.x, at.y);
  Sums<chunks> sums[attention_queries], part[attention_queries];
  for (uint r = 0; r < attention_queries; r++) clear(sums[r]);
  const uint earliest = queries.earliest / attention_span * attention_span;
  for (uint begin = earliest; begin < queries.longest; begin += attention_span) {
    attend(params, queries, cached, at.y, begin, min(begin + attention_span, queries.longest), weights, lane, part);
    for (uint r = 0; r < attention_queries; r++) add_sums(sums[r], part[r]);
  }
  for (uint r = 0; r < queries.count; r++) {
    if (params.has_sinks != 0) add_sink(sums[r], sinks[queries.index[r] % params.heads]);
    for (int c = 0; c < chunks; c++) {
      const uint i = lane + uint(c) * lanes;
      if (i < params.dim) out[ulong(queries.index[r]) * params.dim + i] = sums[r].values[c] / sums[r].total;
    }
  }
}

// A simdgroup a span, from first_span on: its sums into parts [n * heads, spans, dim + 2]. Grid: tiles of queries, key
// heads, spans.
template <typename T, int chunks>
kernel void attention_spans(constant AttentionParams& params [[buffer(0)]], device const float* q [[buffer(1)]],
                            device const float* q_pe [[buffer(2)]], device const RowBlock* blocks [[buffer(3)]],
                            device const T* first [[buffer(4)]], device const T* second [[buffer(5)]],
                            device const T* third [[buffer(6)]], device const T* fourth [[buffer(7)]],
                            device float* parts [[buffer(8)]], uint3 at [[threadgroup_position_in_grid]],
                            uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float weights[attention_queries][lanes];
  const Cached<T> cached = {blocks, first, second, third, fourth};
  const Queries queries = queries_of(params, q, q_pe, at.x, at.y);
  Sums<chunks> sums[attention_queries];
  const uint begin = (params.first_span + at.z) * attention_span;
  attend(params, queries, cached, at.y, begin, min(begin + attention_span, queries.longest), weights, lane, sums);
  for (uint r = 0; r < queries.count; r++) {
    device float* part = parts + (ulong(queries.index[r]) * params.spans + at.z) * (params.dim + 2);
    if (lane == 0) part[0] = sums[r].highest;
    if (lane == 0) part[1] = sums[r].total;
    for (int c = 0; c < chunks; c++) {
      const uint i = lane + uint(c) * lanes;
      if (i < params.dim) part[2 + i] = sums[r].values[c];
    }
  }
}

// The spans of each query, in their order, behind what an earlier round left in `before` [n * heads, dim + 2], if they
// are not the first. The last round makes the result, each other one what the next begins with. Grid of threads:
// numbers of a value, heads, rows.
kernel void attention_merge(constant AttentionParams& params [[buffer(0)]], device const float* parts [[buffer(1)]],
                            device const float* before [[buffer(2)]], device const float* sinks [[buffer(3)]],
                            device float* out [[buffer(4)]], uint3 at [[thread_position_in_grid]]) {
  if (at.x >= params.dim) return;
  const ulong query = ulong(at.z) * params.heads + at.y;
  Sums<1> sums, more;
  clear(sums);
  if (params.is_first == 0) {
    device const float* part = before + query * (params.dim + 2);
    sums.highest = part[0];
    sums.total = part[1];
    sums.values[0] = part[2 + at.x];
  }
  for (uint span = 0; span < params.spans; span++) {
    device const float* part = parts + (query * params.spans + span) * (params.dim + 2);
    more.highest = part[0];
    more.total = part[1];
    more.values[0] = part[2 + at.x];
    add_sums(sums, more);
  }
  if (params.is_last != 0) {
    if (params.has_sinks != 0) add_sink(sums, sinks[at.y]);
    out[query * params.dim + at.x] = sums.values[0] / sums.total;
    return;
  }
  device float* part = out + query * (params.dim + 2);
  if (at.x == 0) part[0] = sums.highest;
  if (at.x == 0) part[1] = sums.total;
  part[2 + at.x] = sums.values[0];
}

#define instantiate_attention(type, T)                                 \
  instantiate_kernel("attention_4_" type, attention, T, 4)             \
  instantiate_kernel("attention_8_" type, attention, T, 8)             \
  instantiate_kernel("attention_16_" type, attention, T, 16)           \
  instantiate_kernel("attention_spans_4_" type, attention_spans, T, 4) \
  instantiate_kernel("attention_spans_8_" type, attention_spans, T, 8) \
  instantiate_kernel("attention_spans_16_" type, attention_spans, T, 16)
instantiate_attention("f32", float)
instantiate_attention("bf16", bfloat)
instantiate_attention("codes", char)

// ---- One step at a time ----------------------------------------------------------------------------------------
// One query's attention as three kernels, the scores in memory between them.

// scores[head][position] = q . k * scale. A simdgroup each; grid of threadgroups: positions, heads.
kernel void attention_scores(constant ScoresParams& params [[buffer(0)]], device const float* q [[buffer(1)]],
                             device const float* k [[buffer(2)]], device float* scores [[buffer(3)]],
                             uint2 at [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  device const float* query = q + at.y * params.dim;
  device const float* key = k + ulong(at.x) * params.kv_dim + at.y / params.heads_per_kv * params.dim;
  float sum = 0.0f;
  for (uint i = lane; i < params.dim; i += lanes) sum = fma(query[i], key[i], sum);
  sum = simd_sum(sum) * params.scale;
  if (lane == 0) scores[ulong(at.y) * params.stride + at.x] = sum;
}

// In place. A threadgroup of row_threads a head.
kernel void attention_softmax(constant ScoresParams& params [[buffer(0)]], device float* scores [[buffer(1)]],
                              uint head [[threadgroup_position_in_grid]],
                              uint thread_index [[thread_index_in_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]],
                              uint simdgroup [[simdgroup_index_in_threadgroup]],
                              uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float maxima[max_simdgroups], totals[max_simdgroups];
  scores += ulong(head) * params.stride;
  float highest = -FLT_MAX;
  for (uint i = thread_index; i < params.length; i += row_threads) highest = max(highest, scores[i]);
  highest = simd_max(highest);
  if (lane == 0) maxima[simdgroup] = highest;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  highest = simd_max(lane < simdgroups ? maxima[lane] : -FLT_MAX);
  float total = 0.0f;
  for (uint i = thread_index; i < params.length; i += row_threads) {
    const float weight = precise::exp(scores[i] - highest);
    scores[i] = weight;
    total += weight;
  }
  total = threadgroup_sum(total, totals, lane, simdgroup, simdgroups);
  for (uint i = thread_index; i < params.length; i += row_threads) scores[i] = scores[i] / total;
}

// Grid of threads: numbers of a value, heads.
kernel void attention_values(constant ScoresParams& params [[buffer(0)]], device const float* weights [[buffer(1)]],
                             device const float* v [[buffer(2)]], device float* out [[buffer(3)]],
                             uint2 at [[thread_position_in_grid]]) {
  if (at.x >= params.dim) return;
  device const float* values = v + at.y / params.heads_per_kv * params.dim + at.x;
  float sum = 0.0f;
  for (uint i = 0; i < params.length; i++)
    sum = fma(weights[ulong(at.y) * params.stride + i], values[ulong(i) * params.kv_dim], sum);
  out[at.y * params.dim + at.x] = sum;
}
