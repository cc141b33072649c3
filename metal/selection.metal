// Attention to the rows that an index selects: what each unit of rows is worth to a row, the best units, and their rows
// side by side. Attention itself is that of attention.metal.
#include "cached.h"

// ---- What units are worth -------------------------------------------------------------------------------------------

// A lane a key: all heads, some at a time, in their order. Nothing that it yields depends on the keys beside it. Grid
// of threadgroups, a simdgroup each: 32 keys, rows.
template <typename T>
kernel void index_scores(constant IndexScoresParams& params [[buffer(0)]], device const float* q [[buffer(1)]],
                         device const float* weights [[buffer(2)]], device const RowBlock* blocks [[buffer(3)]],
                         device const T* first [[buffer(4)]], device const T* second [[buffer(5)]],
                         device const T* third [[buffer(6)]], device const T* fourth [[buffer(7)]],
                         device float* scores [[buffer(8)]], uint2 at [[threadgroup_position_in_grid]],
                         uint lane [[thread_index_in_simdgroup]]) {
  const ulong key = ulong(at.x) * lanes + lane;
  if (key >= (params.first_position + at.y + 1) / params.unit) return;
  const Cached<T> cached = {blocks, first, second, third, fourth};
  const uint row = uint(key % params.block_keys);
  device const T* keys = block_of(cached, key / params.block_keys) + params.keys_begin / sizeof(T);
  device const T* numbers = keys + ulong(row) * params.dim;
  const float scale = scale_of(keys, params.block_keys, params.dim, 0, row) * params.scale;
  q += ulong(at.y) * params.q_row_stride;
  float total = 0.0f;
  for (uint head = 0; head < params.heads; head += index_heads) {
    float sums[index_heads] = {};
    for (uint i = 0; i < params.dim; i++) {
      const float number = float(numbers[i]);
      for (uint j = 0; j < index_heads; j++)
        sums[j] = fma(q[ulong(min(head + j, params.heads - 1)) * params.q_head_stride + i], number, sums[j]);
    }
    for (uint j = 0; j < index_heads; j++) {
      if (head + j >= params.heads) break;
      const float score = sums[j] * scale;
      const float weight = params.has_weights != 0 ? weights[ulong(at.y) * params.heads + head + j] : 1.0f;
      total = fma(score < 0.0f ? 0.0f : score, weight, total);
    }
  }
  scores[ulong(at.y) * params.stride + key] = total;
}
instantiate_kernel("index_scores_f32", index_scores, float)
instantiate_kernel("index_scores_bf16", index_scores, bfloat)
instantiate_kernel("index_scores_codes", index_scores, char)

// ---- The best -------------------------------------------------------------------------------------------------------

// Whole numbers in the order of the scores. Both zeros are one, and NaN is the least.
inline uint rank_of(float score) {
  const uint bits = as_type<uint>(score), size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return 0;
  return bits > 0x80000000u ? ~bits : size | 0x80000000u;
}

// The sum over a threadgroup. `counts` may be used again at once.
inline uint threadgroup_count(uint value, threadgroup uint* counts, uint lane, uint simdgroup, uint simdgroups) {
  value = simd_sum(value);
  if (lane == 0) counts[simdgroup] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  value = simd_sum(lane < simdgroups ? counts[lane] : 0u);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return value;
}

// The rank of the last that is selected is found bit by bit. Then each thread writes those of its own part of the
// units, behind those of the threads before it. A threadgroup of row_threads for each row.
kernel void index_select(constant IndexSelectParams& params [[buffer(0)]], device const float* scores [[buffer(1)]],
                         device int* ids [[buffer(2)]], uint row [[threadgroup_position_in_grid]],
                         uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]],
                         uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup uint counts[max_simdgroups], above[row_threads], level[row_threads];
  const uint seen = uint((params.first_position + row + 1) / params.unit);
  if (seen <= params.count) return;
  scores += ulong(row) * params.stride;
  ids += ulong(row) * params.count;
  uint last = 0;
  for (uint bit = 0x80000000u; bit != 0; bit >>= 1) {
    uint reach = 0;
    for (uint i = thread_index; i < seen; i += row_threads) reach += rank_of(scores[i]) >= (last | bit) ? 1u : 0u;
    if (threadgroup_count(reach, counts, lane, simdgroup, simdgroups) >= params.count) last |= bit;
  }
  const uint part = (seen + row_threads - 1) / row_threads;
  const uint begin = min(thread_index * part, seen), end = min(begin + part, seen);
  uint higher = 0, equal = 0;
  for (uint i = begin; i < end; i++) {
    const uint rank = rank_of(scores[i]);
    higher += rank > last ? 1u : 0u;
    equal += rank == last ? 1u : 0u;
  }
  above[thread_index] = higher;
  level[thread_index] = equal;
  const uint left = params.count - threadgroup_count(higher, counts, lane, simdgroup, simdgroups);
  higher = 0;
  equal = 0;
  for (uint i = 0; i < thread_index; i++) {
    higher += above[i];
    equal += level[i];
  }
  for (uint i = begin; i < end; i++) {
    const uint rank = rank_of(scores[i]);
    if (rank > last || (rank == last && equal < left)) ids[higher + min(equal, left)] = int(i);
    higher += rank > last ? 1u : 0u;
    equal += rank == last ? 1u : 0u;
  }
}

// ---- Their rows -----------------------------------------------------------------------------------------------------

// Which cached row is number i of those that are gathered.
inline ulong gathered_row(constant GatherRowsParams& params, device const int* ids, uint i) {
  return i < params.selected ? ulong(ids[i / params.unit]) * params.unit + i % params.unit : params.skipped + i;
}

// To blocks of one buffer. Grid: numbers of a row, rows.
template <typename T>
kernel void gather_rows(constant GatherRowsParams& params [[buffer(0)]], device const int* ids [[buffer(1)]],
                        device const RowBlock* from [[buffer(2)]], device const T* first [[buffer(3)]],
                        device const T* second [[buffer(4)]], device const T* third [[buffer(5)]],
                        device const T* fourth [[buffer(6)]], device const RowBlock* to [[buffer(7)]],
                        device T* out [[buffer(8)]], uint2 at [[thread_position_in_grid]]) {
  if (at.x >= params.width) return;
  const Cached<T> cached = {from, first, second, third, fourth};
  const uint i = params.first + at.y;
  const ulong row = gathered_row(params, ids, i);
  device const T* numbers = block_of(cached, row / cached_block) + params.from_begin / sizeof(T);
  out += (to[i / cached_block].begin + params.to_begin) / sizeof(T);
  out[ulong(i % cached_block) * params.width + at.x] = numbers[row % cached_block * params.width + at.x];
}
instantiate_kernel("gather_rows_f32", gather_rows, float)
instantiate_kernel("gather_rows_bf16", gather_rows, ushort)
instantiate_kernel("gather_rows_codes", gather_rows, char)

// The scales of the codes, which lie behind those of a block. Grid: heads, rows.
kernel void gather_scales(constant GatherRowsParams& params [[buffer(0)]], device const int* ids [[buffer(1)]],
                          device const RowBlock* from [[buffer(2)]], device const char* first [[buffer(3)]],
                          device const char* second [[buffer(4)]], device const char* third [[buffer(5)]],
                          device const char* fourth [[buffer(6)]], device const RowBlock* to [[buffer(7)]],
                          device char* out [[buffer(8)]], uint2 at [[thread_position_in_grid]]) {
  if (at.x >= params.heads) return;
  const Cached<char> cached = {from, first, second, third, fourth};
  const uint i = params.first + at.y;
  const ulong row = gathered_row(params, ids, i), codes = ulong(cached_block) * params.width;
  device const char* block = block_of(cached, row / cached_block) + params.from_begin + codes;
  device ushort* scales = (device ushort*)(out + to[i / cached_block].begin + params.to_begin + codes);
  scales[at.x * cached_block + i % cached_block] =
      ((device const ushort*)block)[at.x * cached_block + row % cached_block];
}
