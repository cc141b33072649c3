// Attention of many rows, with the bits that attention.cuh has: what a query yields is defined there. A block takes
// many queries that share a key head through the keys, and a thread has several sums of each kind, so that what it
// loads from shared memory serves several products.
#include "attention.h"

constexpr u32 tile_queries = attention_tile_queries;
constexpr u32 tile_warps = attention_threads / lanes;
constexpr u32 queries_of_warp = tile_queries / tile_warps;  // whose weights it makes
constexpr u32 side = 4;                                     // scores of a thread: of so many queries with so many keys
constexpr u32 values_side = 8;                              // values of a thread: of so many queries, four numbers each
constexpr u32 row_step = 32 * tile_warps / 2;               // of a row of values, that the block has side by side
static_assert(tile_queries * attention_chunk == side * side * attention_threads / 2,
              "two threads have the same scores");
static_assert(tile_queries == 2 * 4 * values_side, "two warps have all queries");

template <u32 dim>
struct AttentionTile {
  float queries[dim][tile_queries];  // as place_in says
  float keys[dim][attention_chunk];
  float values[attention_chunk][dim];
  float4 sums[tile_queries * dim / 4 / attention_threads][attention_threads];  // of all spans before
  float weights[attention_chunk][tile_queries + 4];
  float scores[tile_queries][attention_chunk + 1];
  float before[tile_queries], after[tile_queries];  // what the span's sums are multiplied by, and the chunk's
  float span_before[tile_queries], span_after[tile_queries];
  float sink_before[tile_queries], total[tile_queries];
  u32 begins[tile_queries], ends[tile_queries];  // of the cached rows that a query sees
  u32 seen[tile_queries];                        // of the chunk, a bit a key
  u32 queries_of_call[tile_queries];             // row * heads + head of each
};

static_assert(sizeof(AttentionTile<128>) == attention_tile_bytes(128), "the host knows how large a tile is");
static_assert(sizeof(AttentionTile<256>) == attention_tile_bytes(256), "likewise");

// Lanes that have an even number of a row and those that have the odd one behind it read different banks.
DEV u32 place_in(u32 i, u32 place) { return place ^ (i & 1) << 4; }

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
  const T* v = reinterpret_cast<const T*>(rows + params.v_begin);
  for (u32 at = threadIdx.x; at < count * (dim / 4); at += attention_threads) {
    const u32 key = at / (dim / 4), i = at % (dim / 4) * 4, row = begin % cached_block + key;
    const T* from = v + (u64(row) * params.kv_heads + kv_head) * dim + i;
    if constexpr (sizeof(T) == sizeof(float))
      copy_16(&to[key][i], from);
    else
      *reinterpret_cast<float4*>(&to[key][i]) =
          four_of(from, scale_of(v, cached_block, params.kv_heads * dim, kv_head, row));
  }
  end_of_copies();
}

// ---- Scores ---------------------------------------------------------------------------------------------------------

// The sums of what the lanes first, first + distance, first + 2 distance ... of attention.cuh have, in its order.
template <u32 dim, u32 distance>
DEV void add_lanes(const AttentionTile<dim>& tile, u32 first, u32 query, u32 key, float (&sums)[side * side]) {
  if constexpr (distance == lanes) {
#pragma unroll
    for (u32 i = 0; i < side * side; i++) sums[i] = 0.0f;
#pragma unroll
    for (u32 i = 0; i < dim; i += lanes) {
      const float4 q = *reinterpret_cast<const float4*>(&tile.queries[first + i][place_in(first, query)]);
      const float4 k = *reinterpret_cast<const float4*>(&tile.keys[first + i][place_in(first, key)]);
      const float queries[side] = {q.x, q.y, q.z, q.w}, keys[side] = {k.x, k.y, k.z, k.w};
#pragma unroll
      for (u32 a = 0; a < side; a++)
#pragma unroll
        for (u32 b = 0; b < side; b++) sums[a * side + b] = fmaf(queries[a], keys[b], sums[a * side + b]);
    }
  } else {
    float more[side * side];
    add_lanes<dim, 2 * distance>(tile, first, query, key, sums);
    add_lanes<dim, 2 * distance>(tile, first + distance, query, key, more);
#pragma unroll
    for (u32 i = 0; i < side * side; i++) sums[i] += more[i];
  }
}

// Of two lanes side by side, one has the even lanes' sums and the other the odd ones'. Each gets those of two keys.
template <u32 dim>
DEV void make_scores(AttentionTile<dim>& tile, float scale) {
  const u32 lane = lane_of(), warp = warp_of(), odd = lane & 1;
  const u32 query = (warp / 2 * 4 + lane / 8) * side, key = (warp % 2 * 4 + lane / 2 % 4) * side;
  float sums[side * side];
  add_lanes<dim, 2>(tile, odd, query, key, sums);
#pragma unroll
  for (u32 a = 0; a < side; a++)
#pragma unroll
    for (u32 b = 0; b < side / 2; b++) {
      const float low = sums[a * side + b], high = sums[a * side + side / 2 + b];
      const float got = __shfl_xor_sync(everyone, odd ? low : high, 1);
      tile.scores[query + a][key + odd * (side / 2) + b] = ((odd ? high : low) + got) * scale;
    }
}

// ---- Weights --------------------------------------------------------------------------------------------------------

// The highest score so far and the sum of the weights: lane i has those of the warp's query i.
struct Heights {
  float span = lowest, span_total = 0.0f;
  float whole = lowest, whole_total = 0.0f;
};

template <u32 dim>
DEV void make_weights(AttentionTile<dim>& tile, u32 begin, u32 end, bool ends_span, Heights& heights) {
  const u32 lane = lane_of(), first = warp_of() * queries_of_warp, key = begin + lane;
  float highest = lowest, total = 0.0f, weights[queries_of_warp];
#pragma unroll
  for (u32 r = 0; r < queries_of_warp; r++) {
    const bool is_seen = key < end && key >= tile.begins[first + r] && key < tile.ends[first + r];
    const float own = is_seen ? tile.scores[first + r][lane] : lowest, most = warp_max(own);
    weights[r] = is_seen ? expf(own - most) : 0.0f;
    const float sum = warp_sum(weights[r]);
    const u32 seen = __ballot_sync(everyone, is_seen);
    if (lane == r) highest = most, total = sum, tile.seen[first + r] = seen;
  }
#pragma unroll
  for (u32 r = 0; r < queries_of_warp; r += 4)
    *reinterpret_cast<float4*>(&tile.weights[lane][first + r]) = {weights[r], weights[r + 1], weights[r + 2],
                                                                  weights[r + 3]};
  if (lane >= queries_of_warp) return;
  const Joint joint = join(heights.span, heights.span_total, highest, total);
  tile.before[first + lane] = joint.before, tile.after[first + lane] = joint.after;
  if (!ends_span) return;
  const Joint spans = join(heights.whole, heights.whole_total, heights.span, heights.span_total);
  tile.span_before[first + lane] = spans.before, tile.span_after[first + lane] = spans.after;
  heights.span = lowest, heights.span_total = 0.0f;
}

// ---- Values ---------------------------------------------------------------------------------------------------------

// Where a thread's values are: queries query ... query + 7, and four numbers from `number` on, then from row_step on.
struct ValuesPlace {
  u32 query;
  u32 number;
};
DEV ValuesPlace values_place() {
  const u32 lane = lane_of(), warp = warp_of();
  return {(warp % 2 * 4 + lane / 8) * values_side, warp / 2 * 32 + lane % 8 * 4};
}

// The weighted values of a chunk, for all queries or for those that see a key.
template <u32 dim, bool by_all>
DEV void add_values(const AttentionTile<dim>& tile, u32 count, const ValuesPlace& at, const u32 (&seen)[values_side],
                    float (&span)[dim / row_step][values_side][4]) {
#pragma unroll
  for (u32 step = 0; step < dim / row_step; step++) {
    float sums[values_side][4] = {};
#pragma unroll by_all ? 8 : 1
    for (u32 j = 0; j < count; j++) {
      const float4 v = *reinterpret_cast<const float4*>(&tile.values[j][at.number + step * row_step]);
      const float4 low = *reinterpret_cast<const float4*>(&tile.weights[j][at.query]),
                   high = *reinterpret_cast<const float4*>(&tile.weights[j][at.query + 4]);
      const float weights[values_side] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (u32 r = 0; r < values_side; r++) {
        if (!by_all && !(seen[r] >> j & 1)) continue;
        sums[r][0] = fmaf(weights[r], v.x, sums[r][0]), sums[r][1] = fmaf(weights[r], v.y, sums[r][1]);
        sums[r][2] = fmaf(weights[r], v.z, sums[r][2]), sums[r][3] = fmaf(weights[r], v.w, sums[r][3]);
      }
    }
#pragma unroll
    for (u32 r = 0; r < values_side; r++)
#pragma unroll
      for (u32 i = 0; i < 4; i++)
        span[step][r][i] = joined(span[step][r][i], sums[r][i], tile.before[at.query + r], tile.after[at.query + r]);
  }
}

template <u32 dim>
DEV void take_values(AttentionTile<dim>& tile, u32 count, bool ends_span,
                     float (&span)[dim / row_step][values_side][4]) {
  const ValuesPlace at = values_place();
  u32 seen[values_side], by_all = everyone;
#pragma unroll
  for (u32 r = 0; r < values_side; r++) seen[r] = tile.seen[at.query + r], by_all &= seen[r];
  if (by_all == everyone >> (attention_chunk - count))
    add_values<dim, true>(tile, count, at, seen, span);
  else
    add_values<dim, false>(tile, count, at, seen, span);
  if (!ends_span) return;
#pragma unroll
  for (u32 step = 0; step < dim / row_step; step++)
#pragma unroll
    for (u32 r = 0; r < values_side; r++) {
      float4& sums = tile.sums[step * values_side + r][threadIdx.x];
      const float before = tile.span_before[at.query + r], after = tile.span_after[at.query + r];
      float (&more)[4] = span[step][r];
      sums = {joined(sums.x, more[0], before, after), joined(sums.y, more[1], before, after),
              joined(sums.z, more[2], before, after), joined(sums.w, more[3], before, after)};
      more[0] = more[1] = more[2] = more[3] = 0.0f;
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
  bring_queries(params, first, kv_head, tile);
#pragma unroll
  for (u32 i = 0; i < tile_queries * dim / 4 / attention_threads; i++)
    tile.sums[i][threadIdx.x] = {0.0f, 0.0f, 0.0f, 0.0f};
  __syncthreads();
  const u32 length = tile.ends[tile_queries - 1];
  const u8* const* blocks = reinterpret_cast<const u8* const*>(params.rows + 1);
  float span[dim / row_step][values_side][4] = {};
  Heights heights;
  u32 begin = tile.begins[0] / attention_chunk * attention_chunk;
  TileKeys<T, dim> keys;
  const auto load = [&](u32 at) {
    keys.load(params, blocks[at / cached_block], kv_head, at, min(at + attention_chunk, length));
  };
  load(begin);
  keys.store(tile.keys);
#pragma unroll 1
  for (; begin < length; begin += attention_chunk) {
    const u32 end = min(begin + attention_chunk, length);
    const bool ends_span = end == length || end % attention_span == 0;
    __syncthreads();  // the keys are there, and nobody reads values
    bring_values<T, dim>(params, blocks[begin / cached_block], kv_head, begin, end - begin, tile.values);
    make_scores(tile, params.scale);
    __syncthreads();
    const bool are_more = end < length;
    if (are_more) load(end);
    make_weights(tile, begin, end, ends_span, heights);
    if (are_more) keys.store(tile.keys);
    wait_for_copies<0>();
    __syncthreads();
    take_values(tile, end - begin, ends_span, span);
  }
  if (lane_of() < queries_of_warp) {
    const u32 place = warp_of() * queries_of_warp + lane_of();
    Joint sink = {1.0f, 0.0f};
    if (params.sinks)
      sink = join(heights.whole, heights.whole_total, params.sinks[tile.queries_of_call[place] % params.heads], 1.0f);
    tile.sink_before[place] = sink.before, tile.total[place] = heights.whole_total;
  }
  __syncthreads();
  const ValuesPlace at = values_place();
  const u32 count = min(tile_queries, params.n * (params.heads / params.kv_heads) - first);
#pragma unroll 1
  for (u32 step = 0; step < dim / row_step; step++)
#pragma unroll 1
    for (u32 r = 0; r < values_side; r++) {
      const u32 place = at.query + r;
      if (place >= count) continue;
      const float4 sums = tile.sums[step * values_side + r][threadIdx.x];
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
