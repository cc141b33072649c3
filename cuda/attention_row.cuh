// Attention of one row in parts, with the bits that attention.cuh has: what a query yields is defined there. A block
// takes a few queries that share a key head through a chunk, or through the chunks of a span. Keys and values come to
// shared memory by asynchronous copies, those of the next chunk while this one is taken.
#include "attention.h"

// A buffer has the keys of a chunk, or its values; behind codes are their scales.
template <typename T, u32 dim>
struct RowBuffer {
  T rows[attention_chunk][dim];
  u16 scales[attention_chunk];

  DEV float scale(const float*, u32) const { return 1.0f; }
  DEV float scale(const u16*, u32) const { return 1.0f; }
  DEV float scale(const signed char*, u32 row) const { return bf16(scales[row]); }
  DEV float number(u32 row, u32 i) const { return number_of(rows[row], i); }
  DEV float scale(u32 row) const { return scale(rows[0], row); }
};

static_assert(sizeof(RowBuffer<float, 256>) == attention_buffer_bytes(256, sizeof(float)), "as the host has it");

// What a block shares besides its buffers.
template <u32 dim, u32 queries>
struct RowOfQueries {
  float weights[attention_chunk][queries];
  float scores[queries][attention_chunk + 1];
  float before[queries], after[queries];  // what sums so far are multiplied by, and the chunk's
};

// Sums over the lanes of a warp: lane l gets that of number l / (lanes / count). The pairs that are added are a
// butterfly's.
template <u32 count>
DEV float some_sums_of_lanes(float (&x)[count]) {
  u32 distance = lanes / 2;
#pragma unroll
  for (u32 half = count / 2; half > 0; half /= 2, distance /= 2) {
    const bool is_upper = lane_of() & distance;
#pragma unroll
    for (u32 i = 0; i < count / 2; i++) {
      if (i >= half) break;
      const float sent = is_upper ? x[i] : x[i + half], kept = is_upper ? x[i + half] : x[i];
      x[i] = kept + __shfl_xor_sync(everyone, sent, distance);
    }
  }
#pragma unroll
  for (; distance > 0; distance /= 2) x[0] += __shfl_xor_sync(everyone, x[0], distance);
  return x[0];
}

// Grid of blocks: queries of a key head, key heads of all sessions, parts. Dynamic memory: the buffers.
//
// All rows but the newest were kept before the batch began. So a block asks for its first chunk before it waits for the
// kernel before, and for the newest row behind that.
template <typename T, u32 dim, u32 warps, u32 queries, bool is_span>
DEV void attention_row(const AttentionParams& params) {
  typedef RowBuffer<T, dim> Buffer;
  constexpr u32 buffers = is_span ? attention_span_buffers : attention_row_buffers;
  constexpr u32 part_rows = is_span ? attention_span : attention_chunk, keys = attention_chunk / warps;
  constexpr u32 together = 16 / queries;  // keys: as many sums as registers have room for beside the queries
  constexpr u32 each = queries * dim / (warps * lanes) / 2;  // queries of a thread, of which it has two numbers
  extern __shared__ float4 space[];
  __shared__ RowOfQueries<dim, queries> shared;
  Buffer* room = reinterpret_cast<Buffer*>(space);
  let_next_come();
  const u32 warp = warp_of(), lane = lane_of(), group = params.heads / params.kv_heads;
  const u32 session = params.sessions ? blockIdx.y / params.kv_heads : 0;
  const u32 kv_head = blockIdx.y - session * params.kv_heads, first = blockIdx.x * queries;
  const CachedRows* cached = params.sessions ? params.sessions[session] : params.rows;
  // What the row sees, and what of that is in the part.
  const u32 end = u32(cached->first) + 1, begin = params.window && end > params.window ? end - params.window : 0;
  const u32 part_begin = (begin / part_rows + blockIdx.z) * part_rows, part_end = min(part_begin + part_rows, end);
  const u32 from = max(part_begin, begin / attention_chunk * attention_chunk);
  const u8* rows = part_begin < end ? reinterpret_cast<u8* const*>(cached + 1)[part_begin / cached_block] : nullptr;
  const auto head_of = [&](u32 r) { return kv_head * group + min(first + r, group - 1); };
  // Keys if `stage` is even, else values.
  const auto bytes_of = [&](u32 stage, u32 row) {
    return rows + (stage % 2 ? params.v_begin : params.k_begin) +
           (u64(row) * params.kv_heads + kv_head) * (dim * sizeof(T));
  };
  const auto first_of = [&](u32 stage) { return from + stage / 2 * attention_chunk; };
  const auto buffer_of = [&](u32 stage) -> Buffer& { return room[stage % buffers]; };
  // Rows of a chunk but the first `skipped`, as far as they are below `below`. Every thread copies the same sixteen
  // bytes of some of them.
  constexpr u32 row_bytes = dim * sizeof(T), pieces = row_bytes / 16, rows_at_once = warps * lanes / pieces;
  const u32 own_row = threadIdx.x / pieces, piece = threadIdx.x % pieces * 16;
  const u64 apart = u64(params.kv_heads) * row_bytes * rows_at_once;
  const auto bring_rows = [&](u32 stage, u32 skipped, u32 below) {
    const u32 at = first_of(stage);
    Buffer& to = buffer_of(stage);
    if (at + skipped < below) {
      const u32 row = at % cached_block;
      const u8* source = bytes_of(stage, row + own_row) + piece;
      u8* own = reinterpret_cast<u8*>(to.rows[own_row]) + piece;
#pragma unroll
      for (u32 key = 0; key < attention_chunk; key += rows_at_once, source += apart)
        if (key + own_row >= skipped && at + key + own_row < below) copy_16(own + key * row_bytes, source);
      if (sizeof(T) == 1 && below == part_end && threadIdx.x < attention_chunk / 8)
        copy_16(to.scales + threadIdx.x * 8,
                reinterpret_cast<const u16*>(rows + (stage % 2 ? params.v_begin : params.k_begin) +
                                             u64(cached_block) * params.kv_heads * dim) +
                    kv_head * cached_block + row + threadIdx.x * 8);
    }
    end_of_copies();
  };
  const auto bring = [&](u32 stage) { bring_rows(stage, 0, part_end); };
  const u32 newest = end - 1;
  const bool has_newest = from <= newest && newest < min(part_end, from + attention_chunk);
  const u32 older_end = has_newest ? newest : part_end;
  if (rows) bring_rows(0, 0, older_end), bring_rows(1, 0, older_end);
  wait_for_previous();
  if (!rows) return;
  if (has_newest) bring_rows(0, newest - from, part_end), bring_rows(1, newest - from, part_end);
  float query[queries][dim / lanes];  // every warp has all of them, a lane every 32nd number
#pragma unroll
  for (u32 r = 0; r < queries; r++) {
    const float* q = params.q + u64(session) * params.q_row_stride + head_of(r) * params.q_head_stride;
#pragma unroll
    for (u32 c = 0; c < dim / lanes; c++) query[r][c] = q[lane + c * lanes];
  }
  float highest = lowest, total = 0.0f;
  float2 values[each] = {};
  const u32 number = threadIdx.x % (dim / 2) * 2, own_query = threadIdx.x / (dim / 2) * each;
#pragma unroll 1
  for (u32 stage = 0, at = from; at < part_end; stage += 2, at += attention_chunk) {
    const u32 count = min(attention_chunk, part_end - at);
    const Buffer& buffer = buffer_of(stage);
    wait_for_copies<1>();
    __syncthreads();  // keys are there, and nobody reads the values before
    if (is_span) bring(stage + 2);
#pragma unroll
    for (u32 j = 0; j < keys; j += together) {
      float sums[together * queries] = {}, scales[together];
      u32 own[together];
#pragma unroll
      for (u32 k = 0; k < together; k++) own[k] = min(warp * keys + j + k, count - 1), scales[k] = buffer.scale(own[k]);
#pragma unroll
      for (u32 c = 0; c < dim / lanes; c++)
#pragma unroll
        for (u32 k = 0; k < together; k++) {
          const float key = buffer.number(own[k], lane + c * lanes) * scales[k];
#pragma unroll
          for (u32 r = 0; r < queries; r++) sums[k * queries + r] = fmaf(query[r][c], key, sums[k * queries + r]);
        }
      const float score = some_sums_of_lanes(sums) * params.scale;
      constexpr u32 same = lanes / (together * queries);  // lanes with one score
      const u32 place = lane / same;
      if (lane % same == 0) shared.scores[place % queries][warp * keys + j + place / queries] = score;
    }
    __syncthreads();
    if (is_span) bring(stage + 3);
    if (warp < queries) {
      const bool is_seen = at + lane < part_end && at + lane >= begin;
      const float own = is_seen ? shared.scores[warp][lane] : lowest;
      float most = warp_max(own);
      const float weight = is_seen ? expf(own - most) : 0.0f, sum = warp_sum(weight);
      shared.weights[lane][warp] = weight;
      if (is_span) {
        const Joint joint = join(highest, total, most, sum);
        if (lane == 0) shared.before[warp] = joint.before, shared.after[warp] = joint.after;
      } else {
        highest = most, total = sum;
      }
    }
    wait_for_copies<is_span ? 2 : 0>();
    __syncthreads();
    const Buffer& v = buffer_of(stage + 1);
    float2 sums[each] = {};
    u32 j = max(at, begin) - at;
    const T* own_values = &v.rows[j][number];
    const float* own_weights = &shared.weights[j][own_query];
#pragma unroll 8
    for (; j < count; j++, own_values += dim, own_weights += queries) {
      const float scale = v.scale(j);
      const float2 two = two_numbers_of(own_values), value = {two.x * scale, two.y * scale};
      float weights[each];
      if constexpr (each % 4 == 0) {
#pragma unroll
        for (u32 r = 0; r < each; r += 4) {
          const float4 four = *reinterpret_cast<const float4*>(own_weights + r);
          weights[r] = four.x, weights[r + 1] = four.y, weights[r + 2] = four.z, weights[r + 3] = four.w;
        }
      } else {
#pragma unroll
        for (u32 r = 0; r < each; r++) weights[r] = own_weights[r];
      }
#pragma unroll
      for (u32 r = 0; r < each; r++)
        sums[r] = {fmaf(weights[r], value.x, sums[r].x), fmaf(weights[r], value.y, sums[r].y)};
    }
#pragma unroll
    for (u32 r = 0; r < each; r++) {
      if (!is_span) {
        values[r] = sums[r];
        continue;
      }
      const float before = shared.before[own_query + r], after = shared.after[own_query + r];
      values[r] = {joined(values[r].x, sums[r].x, before, after), joined(values[r].y, sums[r].y, before, after)};
    }
  }
  const u32 all_queries = gridDim.y / params.kv_heads * params.heads;
  const auto part_of = [&](u32 r) {
    return place_of_part(params, all_queries, session * params.heads + head_of(r), blockIdx.z);
  };
  const u32 here = min(queries, group - first);
  if (warp < here && lane == 0) *part_of(warp).highest = highest, *part_of(warp).total = total;
#pragma unroll
  for (u32 r = 0; r < each; r++)
    if (own_query + r < here) *reinterpret_cast<float2*>(part_of(own_query + r).values + number) = values[r];
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

#define ROW_KERNELS(type, T, dim)                                                     \
  KERNEL(attention_row_chunks_##type##_##dim, AttentionParams, (attention_threads),   \
         (attention_row<T, dim, 8, attention_row_queries, false>))                    \
  KERNEL(attention_row_eights_##type##_##dim, AttentionParams, (attention_threads),   \
         (attention_row<T, dim, 8, attention_queries, false>))                        \
  KERNEL(attention_row_spans_##type##_##dim, AttentionParams, (attention_threads, 2), \
         (attention_row<T, dim, 8, attention_queries, true>))
FOR_COPIED_ROWS(ROW_KERNELS)
