// Softmax attention over cached rows: grouped queries, and latent attention in its absorbed form.
//
// A block takes a few queries that share a key head through the keys, a chunk at a time. What a query yields depends on
// the rows that it sees, and not on how the work was cut:
//   * A score is a chain in each lane over every 32nd number of the key, then the lanes' sum.
//   * A chunk's weights are relative to its highest score. Its values are one chain over its keys.
//   * Chunks are added one after the other to their span's sums, which begin at nothing, and spans to the whole.
// One block does so for all that a query sees, or each chunk or span has a block, and the merge adds them in that
// order.
#include "attention.h"
#include "kept_digits.h"

constexpr u32 chunk_of_warp = attention_chunk / product_warps;  // keys
static_assert(attention_threads == attention_queries * lanes, "a warp a query");
static_assert(chunk_of_warp * attention_queries == lanes, "a lane a score");

// ---- Queries --------------------------------------------------------------------------------------------------------

// Of one key head: rows of the call, and in each the heads that share it.
struct Queries {
  const CachedRows* rows;
  u32 first;
  u32 count;
  u32 all;
  u32 group;  // query heads of the key head
  u32 kv_head;
  u32 position;  // of the call's first row
  u32 window;
  // The query that is the warp's.
  u32 row;
  u32 head;
  u32 begin;  // the cached rows that it sees
  u32 end;
  // Those that any query of the block sees: later queries see later ones.
  u32 begin_of_all;
  u32 end_of_all;

  // Behind the last they are the last again.
  DEV u32 row_of(u32 i) const { return min(first + i, all - 1) / group; }
  DEV u32 begin_of(u32 end) const { return window && end > window ? end - window : 0; }
};
// `place`: of a key head, among those of all sessions.
DEV Queries queries_of(const AttentionParams& params, u32 tile, u32 place) {
  const u32 group = params.heads / params.kv_heads, all = params.n * group, first = tile * attention_queries;
  const u32 session = params.sessions ? place / params.kv_heads : 0, kv_head = place - session * params.kv_heads;
  const CachedRows* rows = params.sessions ? params.sessions[session] : params.rows;
  const u32 position = u32(rows->first);
  Queries of = {rows, first, min(attention_queries, all - first), all, group, kv_head, position, params.window};
  const u32 row = of.row_of(warp_of());
  of.row = session + row;
  of.head = kv_head * group + min(first + warp_of(), all - 1) - row * group;
  of.end = position + row + 1;
  of.begin = of.begin_of(of.end);
  of.begin_of_all = of.begin_of(position + of.row_of(0) + 1);
  of.end_of_all = position + of.row_of(attention_queries - 1) + 1;
  return of;
}

// What a block shares.
struct Chunk {
  float scores[attention_queries][attention_chunk + 1];
  float weights[attention_chunk][attention_queries];
  u32 seen[attention_queries];      // by each query, a bit a key
  u32 queries[attention_queries];   // row * heads + head of each
  float before[attention_queries];  // what the sums so far are multiplied by when a chunk comes to them
  float after[attention_queries];   // and the chunk
  float span_before[attention_queries];
  float span_after[attention_queries];
  float sink_before[attention_queries];
  float total[attention_queries];
};

// Number i of query r is in the half of four queries that r is in, so that lanes read neighbours.
DEV u32 place_of_query(u32 dim, u32 i, u32 r) { return (r / 4 * dim + i) * 4 + r % 4; }
DEV void bring_query(const float* q, u32 dim, float* queries) {
  constexpr u32 together = 8;  // numbers that are loaded before any is stored
  for (u32 first = lane_of(); first < dim; first += together * lanes) {
    float numbers[together];
#pragma unroll
    for (u32 j = 0; j < together; j++) numbers[j] = q[min(first + j * lanes, dim - 1)];
#pragma unroll
    for (u32 j = 0; j < together; j++)
      if (first + j * lanes < dim) queries[place_of_query(dim, first + j * lanes, warp_of())] = numbers[j];
  }
}
// Puts the queries into shared memory, then their positional parts. A warp each.
DEV void bring_queries(const AttentionParams& params, const Queries& of, float* queries) {
  bring_query(params.q + u64(of.row) * params.q_row_stride + of.head * params.q_head_stride, params.dim, queries);
  if (params.pe_dim == 0) return;
  bring_query(params.q_pe + u64(of.row) * params.q_pe_row_stride + of.head * params.q_pe_head_stride, params.pe_dim,
              queries + params.dim * attention_queries);
}

// Asks for the keys and values of rows begin ... end - 1 of a block, which are needed soon.
template <typename T>
DEV void prefetch_rows(const AttentionParams& params, const u8* rows, u32 kv_head, u32 begin, u32 end) {
  constexpr u32 line = 128;
  const u32 bytes = params.dim * sizeof(T), lines = (bytes + line - 1) / line;
  for (u32 i = threadIdx.x; i < (end - begin) * lines; i += attention_threads) {
    const u64 head = u64((begin + i / lines) % cached_block) * params.kv_heads + kv_head;
    const u64 at = head * bytes + min(i % lines * line, bytes - 1);
    prefetch_line(rows + params.k_begin + at);
    prefetch_line(rows + params.v_begin + at);
  }
}

// ---- A chunk --------------------------------------------------------------------------------------------------------

// Adds keys[...] . queries[...] of `dim` numbers, each lane every 32nd.
template <typename T>
DEV void add_products(const T* const (&keys)[chunk_of_warp], const float* queries, u32 dim,
                      const float (&scales)[chunk_of_warp], float (&sums)[lanes]) {
#pragma unroll 4
  for (u32 i = lane_of(); i < dim; i += lanes) {
    const float4 low = reinterpret_cast<const float4*>(queries)[i],
                 high = reinterpret_cast<const float4*>(queries)[dim + i];
    const float query[attention_queries] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (u32 j = 0; j < chunk_of_warp; j++) {
      const float key = number_of(keys[j], i) * scales[j];
#pragma unroll
      for (u32 r = 0; r < attention_queries; r++)
        sums[j * attention_queries + r] = fmaf(query[r], key, sums[j * attention_queries + r]);
    }
  }
}

// Adds the weighted values of `count` keys from `begin` on, for all queries or for those that see a key.
template <typename T, u32 slots, bool by_all>
DEV void add_values(const AttentionParams& params, const Queries& of, const T* v, u32 begin, u32 count,
                    const Chunk& chunk, float (&values)[slots][attention_queries]) {
  const u32 width = params.kv_heads * params.dim, first = begin % cached_block;
#pragma unroll 1
  for (u32 s = 0; s < slots; s++) {
    const u32 i = threadIdx.x + s * attention_threads;
    if (i >= params.dim) break;
    const T* numbers = v + u64(first) * width + of.kv_head * params.dim;
    float sums[attention_queries] = {};
#pragma unroll by_all ? 8 : 2
    for (u32 j = 0; j < count; j++, numbers += width) {
      const float value = number_of(numbers, i) * scale_of(v, cached_block, width, of.kv_head, first + j);
#pragma unroll
      for (u32 r = 0; r < attention_queries; r++)
        if (by_all || chunk.seen[r] >> j & 1) sums[r] = fmaf(chunk.weights[j][r], value, sums[r]);
    }
#pragma unroll
    for (u32 t = 0; t < slots; t++)
#pragma unroll
      for (u32 r = 0; r < attention_queries; r++)
        if (t == s) values[t][r] = sums[r];
  }
}

// The weights of keys begin ... end - 1, at most a chunk of one block, and their values. `highest` and `total` are
// those of the query that is the warp's. `rows`: the block that the keys are in.
template <typename T, u32 slots>
DEV void take_chunk(const AttentionParams& params, const Queries& of, const float* queries, const u8* rows, u32 begin,
                    u32 end, Chunk& chunk, float& highest, float& total, float (&values)[slots][attention_queries]) {
  const T* k = reinterpret_cast<const T*>(rows + params.k_begin);
  const T* v = reinterpret_cast<const T*>(rows + params.v_begin);
  const T* pe = reinterpret_cast<const T*>(rows + params.pe_begin);
  const u32 lane = lane_of(), warp = warp_of(), width = params.kv_heads * params.dim;
  float sums[lanes] = {};
  {
    const T *keys[chunk_of_warp], *positions[chunk_of_warp];
    float scales[chunk_of_warp], pe_scales[chunk_of_warp];
#pragma unroll
    for (u32 j = 0; j < chunk_of_warp; j++) {
      const u32 row = min(begin + warp * chunk_of_warp + j, end - 1) % cached_block;
      keys[j] = k + (u64(row) * params.kv_heads + of.kv_head) * params.dim;
      scales[j] = scale_of(k, cached_block, width, of.kv_head, row);
      if (params.pe_dim) {
        positions[j] = pe + u64(row) * params.pe_dim;
        pe_scales[j] = scale_of(pe, cached_block, params.pe_dim, 0, row);
      }
    }
    add_products<T>(keys, queries, params.dim, scales, sums);
    if (params.pe_dim)
      add_products<T>(positions, queries + params.dim * attention_queries, params.pe_dim, pe_scales, sums);
  }
  const float score = sums_of_lanes(sums) * params.scale;
  chunk.scores[lane % attention_queries][warp * chunk_of_warp + lane / attention_queries] = score;
  __syncthreads();
  const u32 key = begin + lane;
  const bool is_seen = key < end && key >= of.begin && key < of.end;
  const float own = is_seen ? chunk.scores[warp][lane] : lowest;
  highest = warp_max(own);
  const float weight = is_seen ? expf(own - highest) : 0.0f;
  total = warp_sum(weight);
  chunk.weights[lane][warp] = weight;
  const u32 seen = __ballot_sync(everyone, is_seen);
  if (lane == 0) chunk.seen[warp] = seen;
  __syncthreads();
#pragma unroll
  for (u32 s = 0; s < slots; s++)
#pragma unroll
    for (u32 r = 0; r < attention_queries; r++) values[s][r] = 0.0f;
  u32 by_all = everyone;
#pragma unroll
  for (u32 r = 0; r < attention_queries; r++) by_all &= chunk.seen[r];
  if (by_all == everyone >> (attention_chunk - (end - begin)))
    add_values<T, slots, true>(params, of, v, begin, end - begin, chunk, values);
  else
    add_values<T, slots, false>(params, of, v, begin, end - begin, chunk, values);
}

// ---- Sums -----------------------------------------------------------------------------------------------------------

// Takes the chunks of keys begin ... end - 1, which are in one span.
template <typename T, u32 slots>
DEV void take_span(const AttentionParams& params, const Queries& of, const float* queries, u32 begin, u32 end,
                   Chunk& chunk, float& highest, float& total, float (&values)[slots][attention_queries]) {
  const u8* rows = reinterpret_cast<const u8* const*>(of.rows + 1)[begin / cached_block];
  highest = lowest;
  total = 0.0f;
#pragma unroll
  for (u32 s = 0; s < slots; s++)
#pragma unroll
    for (u32 r = 0; r < attention_queries; r++) values[s][r] = 0.0f;
  for (u32 at = max(begin, of.begin_of_all / attention_chunk * attention_chunk); at < end; at += attention_chunk) {
    float chunk_highest, chunk_total, chunk_values[slots][attention_queries];
    take_chunk<T, slots>(params, of, queries, rows, at, min(at + attention_chunk, end), chunk, chunk_highest,
                         chunk_total, chunk_values);
    const Joint joint = join(highest, total, chunk_highest, chunk_total);
    if (lane_of() == 0) chunk.before[warp_of()] = joint.before, chunk.after[warp_of()] = joint.after;
    __syncthreads();
#pragma unroll
    for (u32 s = 0; s < slots; s++)
#pragma unroll
      for (u32 r = 0; r < attention_queries; r++)
        values[s][r] = joined(values[s][r], chunk_values[s][r], chunk.before[r], chunk.after[r]);
  }
}

// A block through all spans. Grid of blocks: tiles of queries, key heads.
template <typename T, u32 slots>
DEV void attention(const AttentionParams& params) {
  extern __shared__ float4 space[];
  float* queries = reinterpret_cast<float*>(space);
  __shared__ Chunk chunk;
  begin_kernel();
  const Queries of = queries_of(params, blockIdx.x, blockIdx.y);
  bring_queries(params, of, queries);
  __syncthreads();
  float highest = lowest, total = 0.0f, values[slots][attention_queries] = {};
  const u32 length = of.end_of_all;
  for (u32 begin = of.begin_of_all / attention_span * attention_span; begin < length; begin += attention_span) {
    float span_highest, span_total, span_values[slots][attention_queries];
    take_span<T, slots>(params, of, queries, begin, min(begin + attention_span, length), chunk, span_highest,
                        span_total, span_values);
    const Joint joint = join(highest, total, span_highest, span_total);
    if (lane_of() == 0) chunk.span_before[warp_of()] = joint.before, chunk.span_after[warp_of()] = joint.after;
    __syncthreads();
#pragma unroll
    for (u32 s = 0; s < slots; s++)
#pragma unroll
      for (u32 r = 0; r < attention_queries; r++)
        values[s][r] = joined(values[s][r], span_values[s][r], chunk.span_before[r], chunk.span_after[r]);
  }
  Joint sink = {1.0f, 0.0f};
  if (params.sinks) sink = join(highest, total, params.sinks[of.head], 1.0f);
  if (lane_of() == 0) {
    chunk.sink_before[warp_of()] = sink.before, chunk.total[warp_of()] = total;
    chunk.queries[warp_of()] = of.row * params.heads + of.head;
  }
  __syncthreads();
#pragma unroll
  for (u32 s = 0; s < slots; s++)
#pragma unroll
    for (u32 r = 0; r < attention_queries; r++) {
      const u32 i = threadIdx.x + s * attention_threads;
      if (r < of.count && i < params.dim)
        keep(params, chunk.queries[r], i, values[s][r] * chunk.sink_before[r] / chunk.total[r]);
    }
}

// The first part that somebody sees.
DEV u32 first_part(const AttentionParams& params, const CachedRows* rows, u32 part_rows) {
  const u64 end = rows->first + 1;
  return params.window && end > params.window ? u32(end - params.window) / part_rows : 0;
}

// A block a chunk, or a span: its sums into parts. Grid of blocks: tiles of queries, key heads of all sessions, parts.
// Those behind the last key have nothing to do. Two kernels, so that neither has the other's text: a kernel that comes
// once a layer finds nothing of it in the caches.
template <typename T, u32 slots, bool is_span>
DEV void attention_parts(const AttentionParams& params) {
  extern __shared__ float4 space[];
  float* queries = reinterpret_cast<float*>(space);
  __shared__ Chunk chunk;
  let_next_come();
  // Lists are there before the batch begins, and a cache that is asked for rows is never wrong.
  const Queries of = queries_of(params, blockIdx.x, blockIdx.y);
  constexpr u32 part_rows = is_span ? attention_span : attention_chunk;
  const u32 begin = (first_part(params, of.rows, part_rows) + blockIdx.z) * part_rows, length = of.end_of_all;
  const bool is_there = begin < of.position + params.n;
  const u8* rows = is_there ? reinterpret_cast<const u8* const*>(of.rows + 1)[begin / cached_block] : nullptr;
  if (begin < length) prefetch_rows<T>(params, rows, of.kv_head, begin, min(begin + part_rows, length));
  wait_for_previous();
  if (!is_there) return;
  bring_queries(params, of, queries);
  if (lane_of() == 0) chunk.queries[warp_of()] = of.row * params.heads + of.head;
  __syncthreads();
  float highest = lowest, total = 0.0f, values[slots][attention_queries] = {};
  if (begin < length) {
    const u32 end = min(begin + part_rows, length);
    if constexpr (is_span)
      take_span<T, slots>(params, of, queries, begin, end, chunk, highest, total, values);
    else
      take_chunk<T, slots>(params, of, queries, rows, begin, end, chunk, highest, total, values);
  }
  const u32 all_queries = (params.sessions ? gridDim.y / params.kv_heads : params.n) * params.heads;
  const auto part = [&](u32 r) { return place_of_part(params, all_queries, chunk.queries[r], blockIdx.z); };
  if (warp_of() < of.count && lane_of() == 0) *part(warp_of()).highest = highest, *part(warp_of()).total = total;
#pragma unroll
  for (u32 s = 0; s < slots; s++)
#pragma unroll
    for (u32 r = 0; r < attention_queries; r++) {
      const u32 i = threadIdx.x + s * attention_threads;
      if (r < of.count && i < params.dim) part(r).values[i] = values[s][r];
    }
}

// In lane l the highest score of lanes 0 to l, or of those from the last multiple of `segment` on, a power of two.
DEV float highest_so_far(float score, u32 segment) {
#pragma unroll 1
  for (u32 distance = 1; distance < segment; distance *= 2) {
    const float other = __shfl_sync(everyone, score, max(lane_of(), distance) - distance);
    if ((lane_of() & (segment - 1)) >= distance) score = fmaxf(score, other);
  }
  return score;
}

// The parts of each query, in their order. What they are multiplied by depends on the highest scores alone, so lanes
// find it together, and only the totals are added one after the other. Grid of blocks: merge_numbers of the values of
// each head, rows, sessions.
DEV void merge_parts(const MergeParams& all) {
  const AttentionParams& params = all.attention;
  extern __shared__ float4 space[];
  auto* more = reinterpret_cast<float4(*)[merge_numbers / 4]>(space);  // of the parts of a round
  __shared__ float totals[merge_threads / lanes][2][lanes];
  __shared__ float highest_of_warp[merge_threads / lanes], whole, sink_before;
  let_next_come();
  const u32 part_rows = params.part_chunks * attention_chunk, of_span = span_chunks / params.part_chunks;
  const CachedRows* rows = params.sessions ? params.sessions[blockIdx.z] : params.rows;
  const u32 end = u32(rows->first) + blockIdx.y + 1, row = blockIdx.z + blockIdx.y,
            begin = params.window && end > params.window ? end - params.window : 0;
  const u32 first = begin / part_rows, last = (end - 1) / part_rows, count = last - first + 1;
  const u32 first_span = first / of_span, spans = last / of_span - first_span + 1, skipped = first & (of_span - 1);
  // Of each part first its highest score and its total. Then what sums before it are multiplied by, and what it is.
  auto* of_part = reinterpret_cast<float2*>(more + min(params.part_count, merge_parts_together));
  float2* of_spans = of_part + count;
  float *span_highest = reinterpret_cast<float*>(of_spans + spans), *span_total = span_highest + spans;
  const u32 slices = gridDim.x / params.heads, head = blockIdx.x / slices, lane = lane_of();
  const u32 begin_of_slice = blockIdx.x % slices * merge_numbers, i = begin_of_slice + threadIdx.x;
  const u32 numbers = min(merge_numbers, params.dim - begin_of_slice), query = row * params.heads + head;
  const PlaceOfPart parts =
      place_of_part(params, gridDim.y * gridDim.z * params.heads, query, first - first_part(params, rows, part_rows));
  // Those that end a span, or all, end a round.
  const auto end_of_round = [&](u32 base) {
    return min(count, base + merge_parts_together - (skipped + base) % merge_parts_together);
  };
  const auto bring = [&](u32 base) {
    const u32 stop = end_of_round(base);
    if (params.dim % 4 == 0) {
      constexpr u32 fours = merge_numbers / 4, together = merge_threads / fours;
      const u32 four = threadIdx.x % fours;
#pragma unroll 4
      for (u32 part = base + threadIdx.x / fours; part < stop; part += together)
        if (four * 4 < numbers)
          copy_16(&more[part - base][four], parts.values + u64(part) * params.dim + begin_of_slice + four * 4);
    } else {
#pragma unroll 1
      for (u32 part = base; part < stop; part++)
        if (threadIdx.x < numbers)
          copy_4(reinterpret_cast<float*>(more[part - base]) + threadIdx.x, parts.values + u64(part) * params.dim + i);
    }
    end_of_copies();
  };
  wait_for_previous();  // lists were there before
#pragma unroll 1
  for (u32 j = threadIdx.x; j < count; j += merge_threads) {
    copy_4(&of_part[j].x, parts.highest + u64(j) * 2);
    copy_4(&of_part[j].y, parts.total + u64(j) * 2);
  }
  end_of_copies();
  bring(0);
  const float gate = gate_of(params, query, min(i, params.dim - 1));
  wait_for_copies<1>();
  __syncthreads();
  // The parts of a span are beside each other in a warp.
#pragma unroll 1
  for (u32 base = warp_of() * lanes; base < skipped + count; base += merge_threads) {
    const u32 part = base + lane - skipped, span = (base + lane) / of_span;
    const bool is_there = base + lane >= skipped && part < count;
    const auto [own, own_total] = is_there ? of_part[part] : float2{lowest, 0.0f};
    const float now = highest_so_far(own, of_span), so_far = __shfl_sync(everyone, now, max(lane, 1u) - 1);
    const float by_before = is_there ? expf((lane & (of_span - 1) ? so_far : lowest) - now) : 1.0f;
    const float by_after = expf(own - now);
    if (is_there) of_part[part] = {by_before, by_after};
    const float highest = __shfl_sync(everyone, now, lane | (of_span - 1));
    __syncwarp();
    totals[warp_of()][0][lane] = by_before, totals[warp_of()][1][lane] = own_total * by_after;
    __syncwarp();
    if ((lane & (of_span - 1)) || span >= spans) continue;
    float sum = 0.0f;  // what is not there adds nothing
#pragma unroll 1
    for (u32 j = lane; j < lane + of_span; j++) sum = fmaf(sum, totals[warp_of()][0][j], totals[warp_of()][1][j]);
    span_highest[span] = highest, span_total[span] = sum;
  }
  __syncthreads();
  float so_far = lowest;  // the highest score of the spans of rounds before
#pragma unroll 1
  for (u32 base = 0; base < spans; base += merge_threads) {
    const u32 span = base + threadIdx.x;
    const float own = span < spans ? span_highest[span] : lowest, of_lanes = highest_so_far(own, lanes);
    if (lane == lanes - 1) highest_of_warp[warp_of()] = of_lanes;
    __syncthreads();
    float of_warps = so_far;
#pragma unroll
    for (u32 w = 0; w < merge_threads / lanes; w++) {
      if (w < warp_of()) of_warps = fmaxf(of_warps, highest_of_warp[w]);
      so_far = fmaxf(so_far, highest_of_warp[w]);
    }
    const float of_lanes_before = __shfl_sync(everyone, of_lanes, max(lane, 1u) - 1);
    const float previous = lane == 0 ? of_warps : fmaxf(of_warps, of_lanes_before), now = fmaxf(of_warps, of_lanes);
    if (span < spans) of_spans[span] = {expf(previous - now), expf(own - now)};
    __syncthreads();
  }
  // Totals are added while threads before these add up values.
  if (threadIdx.x == merge_threads - 1) {
    float sum = 0.0f;
#pragma unroll 8
    for (u32 span = 0; span < spans; span++) sum = fmaf(sum, of_spans[span].x, span_total[span] * of_spans[span].y);
    Joint sink = {1.0f, 0.0f};
    if (params.sinks) sink = join(so_far, sum, params.sinks[head], 1.0f);
    sink_before = sink.before, whole = sum;
  }
  float value = 0.0f;
#pragma unroll 1
  for (u32 base = 0, stop; base < count; base = stop) {
    stop = end_of_round(base);
    if (base > 0) {
      __syncthreads();
      bring(base);
    }
    wait_for_copies<0>();
    __syncthreads();
    if (threadIdx.x >= numbers) continue;
    const float* own = reinterpret_cast<const float*>(more) + threadIdx.x;
    if (of_span == 1) {  // it is added to nothing, by its factors 0 and 1
#pragma unroll 8
      for (u32 part = base; part < stop; part++)
        value = joined(value, own[(part - base) * merge_numbers] + 0.0f, of_spans[part].x, of_spans[part].y);
      continue;
    }
#pragma unroll 1
    for (u32 span = (skipped + base) / of_span; span * of_span < skipped + stop; span++) {
      float sum = 0.0f;
#pragma unroll
      for (u32 j = 0; j < span_chunks; j++) {
        const u32 part = span * of_span + j - skipped, at = max(min(part, stop - 1), base);
        const float with = joined(sum, own[(at - base) * merge_numbers], of_part[at].x, of_part[at].y);
        if (part == at && j < of_span) sum = with;
      }
      value = joined(value, sum, of_spans[span].x, of_spans[span].y);
    }
  }
  __syncthreads();  // the total is there, and nobody reads values of parts any more
  value = value * sink_before / whole * gate;
  if (threadIdx.x < numbers) params.out[u64(query) * params.dim + i] = value;
  if (!all.to.digits) return;
  float* made = reinterpret_cast<float*>(more);
  if (threadIdx.x < numbers) made[threadIdx.x] = value;
  __syncthreads();
  if (warp_of() == 0) keep_group(all.to, params.heads * params.dim, row, head * params.dim + begin_of_slice, made);
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

#define ATTENTION_KERNEL(name, function) KERNEL(name, AttentionParams, (attention_threads), function)
#define ATTENTION_KERNELS(type, T, slots)                                                 \
  ATTENTION_KERNEL(attention_##type##_##slots, (attention<T, slots>))                     \
  ATTENTION_KERNEL(attention_chunks_##type##_##slots, (attention_parts<T, slots, false>)) \
  ATTENTION_KERNEL(attention_spans_##type##_##slots, (attention_parts<T, slots, true>))
KERNEL(attention_merge, MergeParams, (merge_threads), merge_parts)
ATTENTION_KERNELS(f32, float, 1)
ATTENTION_KERNELS(f32, float, 2)
ATTENTION_KERNELS(bf16, u16, 1)
ATTENTION_KERNELS(bf16, u16, 2)
ATTENTION_KERNELS(codes, signed char, 1)
ATTENTION_KERNELS(codes, signed char, 2)
