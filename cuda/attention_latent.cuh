// Attention of one row over latents that are keys and values at once, in chunks, with the bits that attention.cuh has:
// what a query yields is defined there. All heads share a chunk, so a block takes many of them through it, with the
// latents and the queries in shared memory.
#include "attention.h"

// Rows of a chunk: latents, and the positional parts of the keys; of codes their scales.
template <typename T>
struct LatentChunk {
  T rows[attention_chunk][latent_dim];
  T positions[attention_chunk][latent_pe_dim];
  u16 scales[2][attention_chunk];
};
static_assert(sizeof(LatentChunk<float>) + latent_query_bytes == latent_bytes(sizeof(float)), "as the host has it");

constexpr u32 latent_warps = latent_threads / lanes, latent_all = latent_dim + latent_pe_dim;
constexpr u32 latent_key_groups = 8, latent_keys = attention_chunk / latent_key_groups;  // of a warp
constexpr u32 latent_query_groups = latent_warps / latent_key_groups;
constexpr u32 latent_eights = latent_queries / latent_query_groups / 8;  // of queries of a warp
static_assert(latent_keys * 8 == lanes && latent_threads == latent_dim, "a lane a score, a thread a number");

DEV float latent_scale(const float*, u32) { return 1.0f; }
DEV float latent_scale(const u16*, u32) { return 1.0f; }
DEV float latent_scale(const signed char*, u32 scale) { return bf16(u16(scale)); }

// Grid of blocks: queries, sessions, chunks. Dynamic memory: the queries, and the chunk.
template <typename T>
DEV void attention_latent(const AttentionParams& params) {
  extern __shared__ float4 latent_space[];
  __shared__ float weights[attention_chunk][latent_queries];
  __shared__ float scores[latent_queries][attention_chunk + 1];
  float4(&queries)[latent_queries / 4][latent_all] =  // number i of four queries together
      *reinterpret_cast<float4(*)[latent_queries / 4][latent_all]>(latent_space);
  LatentChunk<T>& chunk = *reinterpret_cast<LatentChunk<T>*>(latent_space + latent_queries / 4 * latent_all);
  let_next_come();
  const u32 warp = warp_of(), lane = lane_of(), session = blockIdx.y, first = blockIdx.x * latent_queries;
  const CachedRows* cached = params.sessions ? params.sessions[session] : params.rows;
  const u32 end = u32(cached->first) + 1, begin = blockIdx.z * attention_chunk;
  const u8* rows = begin < end ? reinterpret_cast<u8* const*>(cached + 1)[begin / cached_block] : nullptr;
  const u32 count = begin < end ? min(attention_chunk, end - begin) : 0, row = begin % cached_block;
  const u8* latents = rows + params.k_begin + u64(row) * sizeof(T[latent_dim]);
  const u8* positions = rows + params.pe_begin + u64(row) * sizeof(T[latent_pe_dim]);
  // A cache that is asked for rows is never wrong.
  for (u32 i = threadIdx.x * 128; i < count * sizeof(T[latent_dim]); i += latent_threads * 128)
    prefetch_line(latents + i);
  wait_for_previous();
  if (!rows) return;
  for (u32 i = threadIdx.x * 16; i < count * sizeof(T[latent_dim]); i += latent_threads * 16)
    copy_16(reinterpret_cast<u8*>(chunk.rows) + i, latents + i);
  for (u32 i = threadIdx.x * 16; i < count * sizeof(T[latent_pe_dim]); i += latent_threads * 16)
    copy_16(reinterpret_cast<u8*>(chunk.positions) + i, positions + i);
  if (sizeof(T) == 1 && threadIdx.x < 2 * attention_chunk / 8) {
    const u32 kind = threadIdx.x / (attention_chunk / 8), at = threadIdx.x % (attention_chunk / 8) * 8;
    const u8* codes = rows + (kind ? params.pe_begin : params.k_begin);
    const u32 width = kind ? latent_pe_dim : latent_dim;
    copy_16(&chunk.scales[kind][at], reinterpret_cast<const u16*>(codes + u64(cached_block) * width) + row + at);
  }
  end_of_copies();
#pragma unroll 1
  for (u32 r = warp; r < latent_queries; r += latent_warps) {
    const u32 head = min(first + r, params.heads - 1);
    const float* q = params.q + u64(session) * params.q_row_stride + head * params.q_head_stride;
    const float* pe = params.q_pe + u64(session) * params.q_pe_row_stride + head * params.q_pe_head_stride;
    float numbers[latent_all / lanes];
#pragma unroll
    for (u32 c = 0; c < latent_all / lanes; c++)
      numbers[c] = c * lanes < latent_dim ? q[c * lanes + lane] : pe[c * lanes - latent_dim + lane];
#pragma unroll
    for (u32 c = 0; c < latent_all / lanes; c++)
      reinterpret_cast<float*>(&queries[r / 4][c * lanes + lane])[r % 4] = numbers[c];
  }
  wait_for_copies<0>();
  __syncthreads();
  {
    const u32 first_key = warp % latent_key_groups * latent_keys,
              first_eight = warp / latent_key_groups * latent_eights;
    u32 own[latent_keys];
    float scales[2][latent_keys], sums[latent_eights][lanes] = {};
#pragma unroll
    for (u32 j = 0; j < latent_keys; j++) {
      own[j] = min(first_key + j, count - 1);
#pragma unroll
      for (u32 kind = 0; kind < 2; kind++) scales[kind][j] = latent_scale(chunk.rows[0], chunk.scales[kind][own[j]]);
    }
    const auto add = [&](u32 at, const float (&keys)[latent_keys]) {
#pragma unroll
      for (u32 e = 0; e < latent_eights; e++) {
        const float4 low = queries[(first_eight + e) * 2][at], high = queries[(first_eight + e) * 2 + 1][at];
        const float query[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (u32 j = 0; j < latent_keys; j++)
#pragma unroll
          for (u32 r = 0; r < 8; r++) sums[e][j * 8 + r] = fmaf(query[r], keys[j], sums[e][j * 8 + r]);
      }
    };
    float keys[latent_keys];
#pragma unroll 1
    for (u32 i = lane; i < latent_dim; i += lanes) {
#pragma unroll
      for (u32 j = 0; j < latent_keys; j++) keys[j] = number_of(chunk.rows[own[j]], i) * scales[0][j];
      add(i, keys);
    }
#pragma unroll 1
    for (u32 i = lane; i < latent_pe_dim; i += lanes) {
#pragma unroll
      for (u32 j = 0; j < latent_keys; j++) keys[j] = number_of(chunk.positions[own[j]], i) * scales[1][j];
      add(latent_dim + i, keys);
    }
#pragma unroll
    for (u32 e = 0; e < latent_eights; e++)
      scores[(first_eight + e) * 8 + lane % 8][first_key + lane / 8] = sums_of_lanes(sums[e]) * params.scale;
  }
  __syncthreads();
  const u32 all_queries = gridDim.y * params.heads, here = min(latent_queries, params.heads - first);
  const auto part_of = [&](u32 r) {
    return place_of_part(params, all_queries, session * params.heads + first + r, blockIdx.z);
  };
#pragma unroll 1
  for (u32 r = warp; r < latent_queries; r += latent_warps) {
    const bool is_seen = lane < count;
    const float own = is_seen ? scores[r][lane] : lowest, highest = warp_max(own);
    const float weight = is_seen ? expf(own - highest) : 0.0f, total = warp_sum(weight);
    weights[lane][r] = weight;
    if (lane == 0 && r < here) *part_of(r).highest = highest, *part_of(r).total = total;
  }
  __syncthreads();
  float values[latent_queries] = {};
#pragma unroll 2
  for (u32 j = 0; j < count; j++) {
    const float value = number_of(chunk.rows[j], threadIdx.x) * latent_scale(chunk.rows[0], chunk.scales[0][j]);
#pragma unroll
    for (u32 r = 0; r < latent_queries; r += 4) {
      const float4 four = *reinterpret_cast<const float4*>(&weights[j][r]);
      values[r] = fmaf(four.x, value, values[r]), values[r + 1] = fmaf(four.y, value, values[r + 1]);
      values[r + 2] = fmaf(four.z, value, values[r + 2]), values[r + 3] = fmaf(four.w, value, values[r + 3]);
    }
  }
#pragma unroll
  for (u32 r = 0; r < latent_queries; r++)
    if (r < here) part_of(r).values[threadIdx.x] = values[r];
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

#define LATENT_KERNEL(type, T) KERNEL(attention_latent_##type, AttentionParams, (latent_threads), (attention_latent<T>))
LATENT_KERNEL(f32, float)
LATENT_KERNEL(bf16, u16)
LATENT_KERNEL(codes, signed char)
