// Attention of many rows, with the bits that attention.cuh has: what a query yields is defined there. A block takes
// many queries that share a key head through the keys, and a thread has several sums of each kind, so that what it
// loads from shared memory serves several products: eight by eight, for otherwise those loads are what it waits for.
#include "attention.h"

constexpr u32 tile_queries = attention_tile_queries;
constexpr u32 tile_warps = attention_threads / lanes;
constexpr u32 queries_of_warp = tile_queries / tile_warps;  // whose weights it makes
constexpr u32 side = 8;      // scores of a thread: of so many queries with so many keys; values: of so many queries
constexpr u32 together = 8;  // lanes that have the same scores, each the sums over every eighth number
constexpr u32 row_step = 32 * tile_warps / 2;  // of a row of values, that the block has side by side, by fours
static_assert(tile_queries * attention_chunk * together == side * side * attention_threads, "all have scores");
static_assert(tile_queries == 2 * 4 * side, "two warps have all queries");
static_assert(queries_of_warp == 8 && attention_chunk == lanes, "a lane has a key, and scores of eight queries");

template <u32 dim>
struct AttentionTile {
  float queries[dim][tile_queries];  // as place_in says
  float keys[dim][attention_chunk];
  float values[attention_chunk][dim];
  float4 span[tile_queries * dim / 4 / attention_threads][attention_threads];  // sums of the chunks before
  float weights[attention_chunk][tile_queries + 4];
  float scores[tile_queries][attention_chunk + 4];
  float before[tile_queries], after[tile_queries];  // what the span's sums are multiplied by, and the chunk's
  float span_before[tile_queries], span_after[tile_queries];
  float sink_before[tile_queries], total[tile_queries];
  u32 begins[tile_queries], ends[tile_queries];  // of the cached rows that a query sees
  u32 seen[tile_queries];                        // of the chunk, a bit a key
  u32 queries_of_call[tile_queries];             // row * heads + head of each
};

static_assert(sizeof(AttentionTile<128>) == attention_tile_bytes(128), "the host knows how large a tile is");
static_assert(sizeof(AttentionTile<256>) == attention_tile_bytes(256), "likewise");

// Sixteen lanes that read numbers of a row side by side, of two eights of queries or of keys, read different banks.
DEV u32 place_in(u32 i, u32 place) { return place ^ ((i >> 1 ^ i >> 2) & 1) << 4; }

template <typename T>
DEV float4 four_of(const T* numbers, float scale) {
  return {number_of(numbers, 0) * scale, number_of(numbers, 1) * scale, number_of(numbers, 2) * scale,
          number_of(numbers, 3) * scale};
}
DEV float4 four_of(const float* numbers, float) { return *reinterpret_cast<const float4*>(numbers); }
DEV float4 four_of(const u16* numbers, float) {
  const uint2 both = *reinterpret_cast<const uint2*>(numbers);
  return {bf16(u16(both.x)), bf16(u16(both.x >> 16)), bf16(u16(both.y)), bf16(u16(both.y >> 16))};
}
// Fours lie below each other.
template <u32 width>
DEV void put_four(float (*rows)[width], u32 i, u32 place, const float4& four) {
  rows[i][place_in(i, place)] = four.x, rows[i + 1][place_in(i + 1, place)] = four.y;
  rows[i + 2][place_in(i + 2, place)] = four.z, rows[i + 3][place_in(i + 3, place)] = four.w;
}

// Keys begin ... end - 1 of a block's rows; behind them is the last one again.
template <typename T, u32 dim>
struct TileKeys {
  static constexpr u32 each = attention_chunk * dim / 4 / attention_threads;
  float4 fours[each];

  DEV void load(const AttentionParams& params, const u8* rows, u32 kv_head, u32 begin, u32 end) {
    const T* k = reinterpret_cast<const T*>(rows + params.k_begin);
    const u32 row = min(begin + threadIdx.x % attention_chunk, end - 1) % cached_block;
    const float scale = scale_of(k, cached_block, params.kv_heads * dim, kv_head, row);
    const T* key = k + (u64(row) * params.kv_heads + kv_head) * dim + threadIdx.x / attention_chunk * 4;
#pragma unroll
    for (u32 j = 0; j < each; j++) fours[j] = four_of(key + j * tile_warps * 4, scale);
  }
  DEV void store(float (&to)[dim][attention_chunk]) const {
#pragma unroll
    for (u32 j = 0; j < each; j++)
      put_four(to, (threadIdx.x / attention_chunk + j * tile_warps) * 4, threadIdx.x % attention_chunk, fours[j]);
  }
};

// The values of these rows, those of f32 while the thread goes on.
template <typename T, u32 dim>
DEV void bring_values(const AttentionParams& params, const u8* rows, u32 kv_head, u32 begin, u32 count,
                      float (&to)[attention_chunk][dim]) {
  constexpr u32 fours = dim / 4, abreast = attention_threads / fours;  // rows that the block brings side by side
  const T* v = reinterpret_cast<const T*>(rows + params.v_begin);
  const u32 i = threadIdx.x % fours * 4, row = begin % cached_block;
  const u64 width = u64(params.kv_heads) * dim;
  const T* from = v + (row + threadIdx.x / fours) * width + kv_head * dim + i;
#pragma unroll 4
  for (u32 key = threadIdx.x / fours; key < count; key += abreast, from += abreast * width) {
    if constexpr (sizeof(T) == sizeof(float))
      copy_16(&to[key][i], from);
    else
      *reinterpret_cast<float4*>(&to[key][i]) =
          four_of(from, scale_of(v, cached_block, params.kv_heads * dim, kv_head, row + key));
  }
  end_of_copies();
}

// ---- Scores ---------------------------------------------------------------------------------------------------------

// Where a thread reads numbers `part`, part + 8 ... of queries and keys: four, and four more.
struct ScorePlaces {
  const float* queries[2];
  const float* keys[2];
};

// The sums of what the lanes part + from, part + from + distance, part + from + 2 distance ... of attention.cuh have,
// in its order.
template <u32 dim, u32 distance, u32 from>
DEV void add_lanes(const ScorePlaces& at, float (&sums)[side][side]) {
  if constexpr (distance == lanes) {
#pragma unroll
    for (u32 a = 0; a < side; a++)
#pragma unroll
      for (u32 b = 0; b < side; b++) sums[a][b] = 0.0f;
#pragma unroll
    for (u32 i = from; i < dim; i += lanes) {
      float queries[side], keys[side];
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        const float4 q = *reinterpret_cast<const float4*>(at.queries[half] + i * tile_queries);
        const float4 k = *reinterpret_cast<const float4*>(at.keys[half] + i * attention_chunk);
        float *four_q = queries + half * 4, *four_k = keys + half * 4;
        four_q[0] = q.x, four_q[1] = q.y, four_q[2] = q.z, four_q[3] = q.w;
        four_k[0] = k.x, four_k[1] = k.y, four_k[2] = k.z, four_k[3] = k.w;
      }
#pragma unroll
      for (u32 a = 0; a < side; a++)
#pragma unroll
        for (u32 b = 0; b < side; b++) sums[a][b] = fmaf(queries[a], keys[b], sums[a][b]);
    }
  } else {
    float more[side][side];
    add_lanes<dim, 2 * distance, from>(at, sums);
    add_lanes<dim, 2 * distance, from + distance>(at, more);
#pragma unroll
    for (u32 a = 0; a < side; a++)
#pragma unroll
      for (u32 b = 0; b < side; b++) sums[a][b] += more[a][b];
  }
}

// Of the lanes that have the same scores, those four numbers apart add up their sums first, then those two apart, then
// neighbours. Each time a lane gets one half and gives the other away. The first half of its queries, and of its keys,
// is what it gets, so that only the last time it has to choose. Lanes next to each other read the same queries, and
// those two apart the same keys: so shared memory has what sixteen lanes want at once.
template <u32 dim>
DEV void make_scores(AttentionTile<dim>& tile, float scale) {
  const u32 lane = lane_of(), warp = warp_of();
  const u32 is_odd = lane >> 4, is_second = lane >> 2 & 1, is_upper = lane >> 3 & 1;  // bits of the part
  const u32 part = is_odd | is_second << 1 | is_upper << 2;
  const u32 query = warp / 2 * 16 + (lane >> 1 & 1) * side, key = warp % 2 * 16 + (lane & 1) * side;
  const u32 own_query = query + is_upper * 4, own_key = key + is_second * 4;
  const ScorePlaces at = {
      {tile.queries[part] + place_in(part, own_query), tile.queries[part] + place_in(part, own_query ^ 4)},
      {tile.keys[part] + place_in(part, own_key), tile.keys[part] + place_in(part, own_key ^ 4)}};
  float sums[side][side];
  add_lanes<dim, together, 0>(at, sums);
#pragma unroll
  for (u32 a = 0; a < side / 2; a++)
#pragma unroll
    for (u32 b = 0; b < side; b++) sums[a][b] += __shfl_xor_sync(everyone, sums[side / 2 + a][b], 8);
#pragma unroll
  for (u32 a = 0; a < side / 2; a++)
#pragma unroll
    for (u32 b = 0; b < side / 2; b++) sums[a][b] += __shfl_xor_sync(everyone, sums[a][side / 2 + b], 4);
#pragma unroll
  for (u32 a = 0; a < 2; a++) {
    float scores[4];
#pragma unroll
    for (u32 b = 0; b < 4; b++) {
      const float low = sums[a][b], high = sums[2 + a][b];
      const float got = __shfl_xor_sync(everyone, is_odd ? low : high, 16);
      scores[b] = ((is_odd ? high : low) + got) * scale;
    }
    *reinterpret_cast<float4*>(&tile.scores[own_query + is_odd * 2 + a][own_key]) = {scores[0], scores[1], scores[2],
                                                                                     scores[3]};
  }
}

// ---- Weights --------------------------------------------------------------------------------------------------------

// The highest score so far and the sum of the weights: lanes 4 i ... 4 i + 3 have those of the warp's query i.
struct Heights {
  float span = lowest, span_total = 0.0f;
  float whole = lowest, whole_total = 0.0f;
};

// Eight numbers over the lanes of a warp, joined in the pairs of a butterfly: lanes 4 i ... 4 i + 3 get that of number
// i.
template <class Join>
DEV float eight_of_lanes(const float (&x)[8], Join join) {
  const u32 lane = lane_of();
  const auto of_both = [&](u32 distance, float low, float high) {
    const bool is_upper = lane & distance;
    return join(is_upper ? high : low, __shfl_xor_sync(everyone, is_upper ? low : high, distance));
  };
  float four[4], two[2];
#pragma unroll
  for (u32 i = 0; i < 4; i++) four[i] = of_both(16, x[i], x[4 + i]);
#pragma unroll
  for (u32 i = 0; i < 2; i++) two[i] = of_both(8, four[i], four[2 + i]);
  float one = of_both(4, two[0], two[1]);
  one = join(one, __shfl_xor_sync(everyone, one, 2));
  return join(one, __shfl_xor_sync(everyone, one, 1));
}

// `sees_all`: every query of the tile sees every key of the chunk, which is whole.
template <u32 dim>
DEV void make_weights(AttentionTile<dim>& tile, u32 begin, u32 end, bool sees_all, bool ends_span, Heights& heights) {
  const u32 lane = lane_of(), first = warp_of() * queries_of_warp, key = begin + lane;
  float own[queries_of_warp], weights[queries_of_warp];
  u32 seen = everyone >> (lanes - queries_of_warp);  // by the lane's queries, a bit each
#pragma unroll
  for (u32 r = 0; r < queries_of_warp; r++) own[r] = tile.scores[first + r][lane];
  if (!sees_all) {
#pragma unroll
    for (u32 r = 0; r < queries_of_warp; r++) {
      const bool is_seen = key < end && key >= tile.begins[first + r] && key < tile.ends[first + r];
      const u32 by = __ballot_sync(everyone, is_seen);
      if (lane == r) tile.seen[first + r] = by;
      if (!is_seen) own[r] = lowest, seen &= ~(1u << r);
    }
  }
  const float highest = eight_of_lanes(own, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
  for (u32 r = 0; r < queries_of_warp; r++) {
    const float weight = expf(own[r] - __shfl_sync(everyone, highest, 4 * r));
    weights[r] = seen >> r & 1 ? weight : 0.0f;
  }
  const float total = eight_of_lanes(weights, [](float a, float b) { return a + b; });
#pragma unroll
  for (u32 r = 0; r < queries_of_warp; r += 4)
    *reinterpret_cast<float4*>(&tile.weights[lane][first + r]) = {weights[r], weights[r + 1], weights[r + 2],
                                                                  weights[r + 3]};
  const u32 place = first + lane / 4;
  const bool keeps = lane % 4 == 0;
  const Joint joint = join(heights.span, heights.span_total, highest, total);
  if (keeps) tile.before[place] = joint.before, tile.after[place] = joint.after;
  if (!ends_span) return;
  const Joint spans = join(heights.whole, heights.whole_total, heights.span, heights.span_total);
  if (keeps) tile.span_before[place] = spans.before, tile.span_after[place] = spans.after;
  heights.span = lowest, heights.span_total = 0.0f;
}

// ---- Values ---------------------------------------------------------------------------------------------------------

// Where a thread's values are: queries query ... query + 7, and four numbers from `number` on, then from row_step on.
// Lanes next to each other have the same queries, and those two apart the same numbers.
struct ValuesPlace {
  u32 query;
  u32 number;
};
DEV ValuesPlace values_place() {
  const u32 lane = lane_of(), warp = warp_of();
  const u32 of_queries = (lane >> 1 & 1) | (lane >> 3 & 1) << 1;
  const u32 of_numbers = (lane & 1) | (lane >> 2 & 1) << 1 | (lane >> 4) << 2;
  return {(warp % 2 * 4 + of_queries) * side, warp / 2 * 32 + of_numbers * 4};
}

DEV float4 joined_fours(const float4& sums, const float (&more)[4], float before, float after) {
  return {joined(sums.x, more[0], before, after), joined(sums.y, more[1], before, after),
          joined(sums.z, more[2], before, after), joined(sums.w, more[3], before, after)};
}

// Where the output of a place has what this thread adds up: until the end, the sums of all spans before.
template <u32 dim>
DEV float4* whole_at(const AttentionParams& params, const AttentionTile<dim>& tile, u32 place, u32 number) {
  return reinterpret_cast<float4*>(params.out + u64(tile.queries_of_call[place]) * dim + number);
}

// The weighted values of a chunk, for all queries or for those that see a key.
template <u32 dim, bool by_all>
DEV void add_values(AttentionTile<dim>& tile, u32 count, bool begins_span) {
  constexpr u32 steps = dim / row_step;
  const ValuesPlace at = values_place();
  float sums[steps][side][4] = {};
  u32 seen[side];
  if (!by_all) {
#pragma unroll
    for (u32 r = 0; r < side; r++) seen[r] = tile.seen[at.query + r];
  }
#pragma unroll by_all ? 8 : 1
  for (u32 j = 0; j < (by_all ? attention_chunk : count); j++) {
    const float4 low = *reinterpret_cast<const float4*>(&tile.weights[j][at.query]),
                 high = *reinterpret_cast<const float4*>(&tile.weights[j][at.query + 4]);
    const float weights[side] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    float4 values[steps];
#pragma unroll
    for (u32 step = 0; step < steps; step++)
      values[step] = *reinterpret_cast<const float4*>(&tile.values[j][at.number + step * row_step]);
#pragma unroll
    for (u32 r = 0; r < side; r++) {
      if (!by_all && !(seen[r] >> j & 1)) continue;
#pragma unroll
      for (u32 step = 0; step < steps; step++) {
        float (&own)[4] = sums[step][r];
        const float4& v = values[step];
        own[0] = fmaf(weights[r], v.x, own[0]), own[1] = fmaf(weights[r], v.y, own[1]);
        own[2] = fmaf(weights[r], v.z, own[2]), own[3] = fmaf(weights[r], v.w, own[3]);
      }
    }
  }
  float4 all[steps][side];  // of the span
  if (begins_span) {
#pragma unroll
    for (u32 r = 0; r < side; r++)
#pragma unroll
      for (u32 step = 0; step < steps; step++) all[step][r] = {0.0f, 0.0f, 0.0f, 0.0f};
  } else {
#pragma unroll
    for (u32 r = 0; r < side; r++)
#pragma unroll
      for (u32 step = 0; step < steps; step++) all[step][r] = tile.span[step * side + r][threadIdx.x];
  }
#pragma unroll
  for (u32 r = 0; r < side; r++) {
    const float before = tile.before[at.query + r], after = tile.after[at.query + r];
#pragma unroll
    for (u32 step = 0; step < steps; step++) {
      all[step][r] = joined_fours(all[step][r], sums[step][r], before, after);
      tile.span[step * side + r][threadIdx.x] = all[step][r];
    }
  }
}

// Adds the span to the sums of all spans before. Of the places, `there` are queries.
template <u32 dim>
DEV void add_span(const AttentionParams& params, AttentionTile<dim>& tile, u32 there, bool is_first) {
  constexpr u32 steps = dim / row_step;
  const ValuesPlace at = values_place();
#pragma unroll 4
  for (u32 r = 0; r < side; r++) {
    const u32 place = at.query + r;
    if (place >= there) break;
    const float before = tile.span_before[place], after = tile.span_after[place];
    float4 all[steps];
#pragma unroll
    for (u32 step = 0; step < steps; step++) {
      all[step] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (!is_first) all[step] = *whole_at(params, tile, place, at.number + step * row_step);
    }
#pragma unroll
    for (u32 step = 0; step < steps; step++) {
      const float4 more = tile.span[step * side + r][threadIdx.x];
      const float numbers[4] = {more.x, more.y, more.z, more.w};
      *whole_at(params, tile, place, at.number + step * row_step) = joined_fours(all[step], numbers, before, after);
    }
  }
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

// Which query has each place, and what it sees: those behind the last are the last again. Puts them into the tile.
template <u32 dim>
DEV void bring_queries(const AttentionParams& params, u32 first, u32 kv_head, AttentionTile<dim>& tile) {
  const u32 group = params.heads / params.kv_heads, all = params.n * group, place = threadIdx.x % tile_queries;
  const u32 query = min(first + place, all - 1), row = query / group, head = kv_head * group + query - row * group;
  const float* q = params.q + u64(row) * params.q_row_stride + u64(head) * params.q_head_stride;
  constexpr u32 together = attention_threads / tile_queries;
#pragma unroll 8
  for (u32 i = threadIdx.x / tile_queries; i < dim / 4; i += together)
    put_four(tile.queries, i * 4, place, float4{q[i * 4], q[i * 4 + 1], q[i * 4 + 2], q[i * 4 + 3]});
  if (threadIdx.x >= tile_queries) return;
  const u32 end = u32(params.rows->first) + row + 1;
  tile.ends[place] = end;
  tile.begins[place] = params.window && end > params.window ? end - params.window : 0;
  tile.queries_of_call[place] = row * params.heads + head;
}

// Grid of blocks: tiles of queries, those that see most first; key heads.
template <typename T, u32 dim>
DEV void attention_tile(const AttentionParams& params) {
  extern __shared__ float4 space[];
  AttentionTile<dim>& tile = *reinterpret_cast<AttentionTile<dim>*>(space);
  begin_kernel();
  const u32 kv_head = blockIdx.y, first = (gridDim.x - 1 - blockIdx.x) * tile_queries;
  const u32 there = min(tile_queries, params.n * (params.heads / params.kv_heads) - first);
  bring_queries(params, first, kv_head, tile);
  __syncthreads();
  const u32 length = tile.ends[tile_queries - 1], seen_by_first = tile.ends[0],
            seen_by_last = tile.begins[tile_queries - 1];
  const u8* const* blocks = reinterpret_cast<const u8* const*>(params.rows + 1);
  Heights heights;
  const u32 start = tile.begins[0] / attention_chunk * attention_chunk;
  TileKeys<T, dim> keys;
  const auto load = [&](const u8* of_block, u32 at) {
    keys.load(params, of_block, kv_head, at, min(at + attention_chunk, length));
  };
  const u8* rows = blocks[start / cached_block];
  load(rows, start);
  keys.store(tile.keys);
#pragma unroll 1
  for (u32 begin = start; begin < length; begin += attention_chunk) {
    const u32 end = min(begin + attention_chunk, length);
    const bool begins_span = begin == start || begin % attention_span == 0;
    const bool ends_span = end == length || end % attention_span == 0;
    const bool sees_all = begin + attention_chunk <= seen_by_first && begin >= seen_by_last;
    const bool are_more = end < length;
    const u8* coming = blocks[(are_more ? end : begin) / cached_block];  // long before it is needed
    __syncthreads();                                                     // the keys are there, and nobody reads values
    bring_values<T, dim>(params, rows, kv_head, begin, end - begin, tile.values);
    make_scores(tile, params.scale);
    __syncthreads();
    if (are_more) load(coming, end);
    make_weights(tile, begin, end, sees_all, ends_span, heights);
    if (are_more) keys.store(tile.keys);
    wait_for_copies<0>();
    __syncthreads();
    if (sees_all)
      add_values<dim, true>(tile, end - begin, begins_span);
    else
      add_values<dim, false>(tile, end - begin, begins_span);
    rows = coming;
    if (ends_span) add_span(params, tile, there, begin / attention_span == start / attention_span);
  }
  {
    const u32 place = warp_of() * queries_of_warp + lane_of() / 4;
    Joint sink = {1.0f, 0.0f};
    if (params.sinks)
      sink = join(heights.whole, heights.whole_total, params.sinks[tile.queries_of_call[place] % params.heads], 1.0f);
    if (lane_of() % 4 == 0) tile.sink_before[place] = sink.before, tile.total[place] = heights.whole_total;
  }
  __syncthreads();
  const ValuesPlace at = values_place();
#pragma unroll 1
  for (u32 step = 0; step < dim / row_step; step++)
#pragma unroll 1
    for (u32 r = 0; r < side; r++) {
      const u32 place = at.query + r;
      if (place >= there) continue;
      const float4 sums = *whole_at(params, tile, place, at.number + step * row_step);
      const float numbers[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
      for (u32 i = 0; i < 4; i++)
        keep(params, tile.queries_of_call[place], at.number + step * row_step + i,
             numbers[i] * tile.sink_before[place] / tile.total[place]);
    }
}

#define TILE_KERNEL(type, T, dim) \
  KERNEL(attention_tiles_##type##_##dim, AttentionParams, (attention_threads), (attention_tile<T, dim>))
FOR_COPIED_ROWS(TILE_KERNEL)
