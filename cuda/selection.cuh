// Attention to the rows that an index selects: what each unit of rows is worth to a row, the best units, and their rows
// side by side. Attention itself is that of attention.cuh.
#include "cached.h"

// ---- What units are worth -------------------------------------------------------------------------------------------

// A thread a key: all heads, some at a time, in their order. Nothing that it yields depends on the keys beside it. Grid
// of blocks of flat_threads: keys, rows.
template <typename T>
DEV void index_scores(const IndexScoresParams& params) {
  begin_kernel();
  const u64 key = u64(blockIdx.x) * flat_threads + threadIdx.x, row = blockIdx.y;
  if (key >= (params.rows->first + row + 1) / params.unit) return;
  const u32 in_block = u32(key % params.block_keys);
  const T* keys = reinterpret_cast<const T*>(cached_rows(params.rows, key, params.keys_begin, params.block_keys));
  const T* numbers = keys + u64(in_block) * params.dim;
  const float scale = scale_of(keys, params.block_keys, params.dim, 0, in_block) * params.scale;
  const float* q = params.q + row * params.q_row_stride;
  float total = 0.0f;
  for (u32 head = 0; head < params.heads; head += index_heads) {
    float sums[index_heads] = {};
    for (u32 i = 0; i < params.dim; i++) {
      const float number = number_of(numbers, i);
#pragma unroll
      for (u32 j = 0; j < index_heads; j++)
        sums[j] = fmaf(q[u64(min(head + j, params.heads - 1)) * params.q_head_stride + i], number, sums[j]);
    }
#pragma unroll
    for (u32 j = 0; j < index_heads; j++) {
      if (head + j >= params.heads) break;
      const float score = sums[j] * scale;
      const float weight = params.weights ? params.weights[row * params.heads + head + j] : 1.0f;
      total = fmaf(score < 0.0f ? 0.0f : score, weight, total);
    }
  }
  params.scores[row * params.stride + key] = total;
}
extern "C" __global__ void index_scores_f32(const IndexScoresParams params) { index_scores<float>(params); }
extern "C" __global__ void index_scores_bf16(const IndexScoresParams params) { index_scores<u16>(params); }
extern "C" __global__ void index_scores_codes(const IndexScoresParams params) { index_scores<signed char>(params); }

// ---- The best -------------------------------------------------------------------------------------------------------

// Whole numbers in the order of the scores. Both zeros are one, and NaN is the least.
DEV u32 rank_of(float score) {
  const u32 bits = __float_as_uint(score), size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return 0;
  return bits > 0x80000000u ? ~bits : size | 0x80000000u;
}

// The sum over a block. `counts` may be used again at once.
DEV u32 block_count(u32 value, u32* counts) {
  for (u32 distance = lanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(everyone, value, distance);
  if (lane_of() == 0) counts[warp_of()] = value;
  __syncthreads();
  value = 0;
  for (u32 warp = 0; warp < row_threads / lanes; warp++) value += counts[warp];
  __syncthreads();
  return value;
}

// The rank of the last that is selected is found bit by bit. Then each thread writes those of its own part of the
// units, behind those of the threads before it. A block of row_threads for each row.
extern "C" __global__ void index_select(const IndexSelectParams params) {
  __shared__ u32 counts[row_threads / lanes], above[row_threads], level[row_threads];
  begin_kernel();
  const u32 seen = u32((params.first_position + blockIdx.x + 1) / params.unit);
  if (seen <= params.count) return;
  const float* scores = params.scores + u64(blockIdx.x) * params.stride;
  int* ids = params.ids + u64(blockIdx.x) * params.count;
  u32 last = 0;
  for (u32 bit = 0x80000000u; bit != 0; bit >>= 1) {
    u32 reach = 0;
    for (u32 i = threadIdx.x; i < seen; i += row_threads) reach += rank_of(scores[i]) >= (last | bit) ? 1u : 0u;
    if (block_count(reach, counts) >= params.count) last |= bit;
  }
  const u32 part = (seen + row_threads - 1) / row_threads;
  const u32 begin = min(threadIdx.x * part, seen), end = min(begin + part, seen);
  u32 higher = 0, equal = 0;
  for (u32 i = begin; i < end; i++) {
    const u32 rank = rank_of(scores[i]);
    higher += rank > last ? 1u : 0u;
    equal += rank == last ? 1u : 0u;
  }
  above[threadIdx.x] = higher;
  level[threadIdx.x] = equal;
  const u32 left = params.count - block_count(higher, counts);
  higher = 0;
  equal = 0;
  for (u32 i = 0; i < threadIdx.x; i++) {
    higher += above[i];
    equal += level[i];
  }
  for (u32 i = begin; i < end; i++) {
    const u32 rank = rank_of(scores[i]);
    if (rank > last || (rank == last && equal < left)) ids[higher + min(equal, left)] = int(i);
    higher += rank > last ? 1u : 0u;
    equal += rank == last ? 1u : 0u;
  }
}

// ---- Their rows -----------------------------------------------------------------------------------------------------

// Number `at.column` of row `at.row` of those that are gathered, and the cached row that it comes from.
struct Gathered {
  u32 row;
  u32 column;
  u64 cached;
  bool is_there;
};
DEV Gathered gathered(const GatherRowsParams& params, u32 width) {
  const u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= u64(params.rows) * width) return {0, 0, 0, false};
  const u32 row = u32(i / width);
  const u64 cached = row < params.selected ? u64(params.ids[row / params.unit]) * params.unit + row % params.unit
                                           : params.skipped + row;
  return {row, u32(i % width), cached, true};
}

// A thread a number.
template <typename T>
DEV void gather_rows(const GatherRowsParams& params) {
  begin_kernel();
  const Gathered at = gathered(params, params.width);
  if (!at.is_there) return;
  const T* from = reinterpret_cast<const T*>(cached_rows(params.from, at.cached, params.from_begin));
  T* to = reinterpret_cast<T*>(cached_rows(params.to, at.row, params.to_begin));
  to[u64(at.row % cached_block) * params.width + at.column] = from[at.cached % cached_block * params.width + at.column];
}
extern "C" __global__ void gather_rows_f32(const GatherRowsParams params) { gather_rows<float>(params); }
extern "C" __global__ void gather_rows_bf16(const GatherRowsParams params) { gather_rows<u16>(params); }
extern "C" __global__ void gather_rows_codes(const GatherRowsParams params) { gather_rows<u8>(params); }

// The scales of the codes, which lie behind those of a block. A thread each.
extern "C" __global__ void gather_scales(const GatherRowsParams params) {
  begin_kernel();
  const Gathered at = gathered(params, params.heads);
  if (!at.is_there) return;
  const u64 codes = u64(cached_block) * params.width;
  const u16* from = reinterpret_cast<const u16*>(cached_rows(params.from, at.cached, params.from_begin + codes));
  u16* to = reinterpret_cast<u16*>(cached_rows(params.to, at.row, params.to_begin + codes));
  to[at.column * cached_block + at.row % cached_block] = from[at.column * cached_block + at.cached % cached_block];
}
