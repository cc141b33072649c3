// Matrices in groups of 64, times one row of f32, by tiles in shared memory.
#include "copied.h"
#include "row_outputs.h"

// What a block shares besides its tiles.
struct RowShared {
  DigitStage stages[copied_warps];
  float squares[row_threads / lanes];
  u64 arrivals[copied_places];
};

// The gated norm of a head that is a part, as gated_rms_norm has it. A warp's.
DEV void gated_head(const float* x, const float* z, const float* weight, float eps, float* to, float* kept) {
  constexpr u32 count = part_columns / lanes;
  float numbers[count], gates[count], squares = 0.0f;
#pragma unroll
  for (u32 c = 0; c < count; c++) numbers[c] = x[lane_of() + c * lanes], gates[c] = z[lane_of() + c * lanes];
#pragma unroll
  for (u32 c = 0; c < count; c++) squares = fmaf(numbers[c], numbers[c], squares);
  const float factor = 1.0f / sqrtf(warp_sum(squares) / float(part_columns) + eps);
#pragma unroll
  for (u32 c = 0; c < count; c++) {
    const u32 i = lane_of() + c * lanes;
    const float made = numbers[c] * factor * weight[i] * silu(gates[c]);
    to[i] = made;
    if (kept) kept[i] = made;
  }
}

// As matmul_one, bit for bit. `bits` is 0 where matrices of 4 and of 8 go together. Where x is
// heads, their gated norm comes first. Dynamic memory: places for tiles, and twice the parts of `together` tiles.
// Weights are on their way before the kernel waits for the one before it; nobody writes them.
template <u32 bits, u32 parts, bool has_heads>
DEV void row_products(const OneRowParams& params) {
  extern __shared__ uint4 room[];
  __shared__ RowShared shared;
  let_next_come();
  const Storage stored = {params.columns, copied_steps, params.number};
  const auto shape_of = [&](u32 matrix) { return tile_shape(params.columns, bits ? bits : params.bits[matrix]); };
  const TilePlaces tiles = {reinterpret_cast<u8*>(room), tile_shape(params.columns, bits ? bits : 8u).bytes(),
                            shared.arrivals};
  const u32 count = (params.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x, all_parts = stored.parts();
  const u32 warp = warp_of(), lane = lane_of(), warps = blockDim.x / lanes;
  float* sums = reinterpret_cast<float*>(tiles.place(params.places));
  const auto place = [&](u32 i) { return tile_place(params, blockIdx.x + i * gridDim.x); };
  const auto bring = [&](u32 i) {
    const TilePlace at = place(i);
    const TileShape shape = shape_of(at.matrix);
    tiles.bring(shape, i % params.places, [&](u32 r) {
      const TilePlace row = row_in_tile(params, at, r);
      return stored_row(params.matrices[row.matrix], shape, row.row);
    });
  };
  if (threadIdx.x == 0) TilePlaces::prepare(shared.arrivals, params.places);
  __syncthreads();
#pragma unroll 1
  for (u32 i = 0; i < min(count, params.places); i++) bring(i);

  float numbers[pack], weights[pack];
  RowPart x[parts];
  Met met = {};
  // The part whose digits the lane helps to make. One that is not there is taken to be the last.
  const u32 own_part = min(warp + (parts > 1 ? lane / (lanes / 2) * warps : 0), all_parts - 1);
  if (!has_heads && params.weight) pack_of_part(params.weight, own_part, weights);
  wait_for_previous();
  if (!has_heads) pack_of_part(params.x, own_part, numbers);
  const auto load = [&](u32 base, u32 here) {
    if (threadIdx.x < here * tile_rows)
      met = load_met(params, place(base + threadIdx.x / tile_rows), threadIdx.x % tile_rows);
  };
  load(0, min(count, params.together));
  if (!has_heads && params.weight) {
    const float factor = norm_factor(params.x, params.columns, params.eps, shared.squares);
#pragma unroll
    for (u32 i = 0; i < pack; i++) numbers[i] = normed(numbers[i], factor, weights[i]);
    if (blockIdx.x == 0 && (parts > 1 || lane < lanes / 2)) {
      float4* to = reinterpret_cast<float4*>(params.normed + own_part * part_columns + lane % (lanes / 2) * pack);
      to[0] = make_float4(numbers[0], numbers[1], numbers[2], numbers[3]);
      to[1] = make_float4(numbers[4], numbers[5], numbers[6], numbers[7]);
    }
  }
  if (has_heads) {
    float* stage = reinterpret_cast<float*>(shared.stages[warp]);
#pragma unroll
    for (u32 p = 0; p < parts; p++) {
      const u32 first = min(warp + p * warps, all_parts - 1) * part_columns;
      gated_head(params.x + first, params.z + first, params.heads, params.eps, stage + p * part_columns,
                 blockIdx.x == 0 ? params.normed + first : nullptr);
    }
    __syncwarp();
    const float* own = stage + (parts > 1 ? lane / (lanes / 2) * part_columns : 0) + lane % (lanes / 2) * pack;
#pragma unroll
    for (u32 i = 0; i < pack; i++) numbers[i] = own[i];
  }
  make_parts<parts>(numbers, shared.stages[warp], x);

#pragma unroll 1
  for (u32 base = 0, half = 0; base < count; base += params.together, half ^= 1) {
    const u32 here = min(params.together, count - base);
    float* of_half = sums + half * params.together * all_parts * tile_rows;
    if (base > 0) load(base, here);
#pragma unroll 1
    for (u32 i = 0; i < here; i++) {
      const u32 at = (base + i) % params.places;
      const u32 matrix = bits ? 0 : place(base + i).matrix;
      const TileShape shape = shape_of(matrix);
      tiles.await(at, (base + i) / params.places);
#pragma unroll
      for (u32 p = 0; p < parts; p++) {
        const u32 part = warp + p * warps;
        if (part >= all_parts) break;
        const u8* tile = tiles.place(at);
        const float sum = bits == 8 || (bits == 0 && params.bits[matrix] == 8)
                              ? part_of_tile<8>(tile, shape, stored, part, x[p])
                              : part_of_tile<4>(tile, shape, stored, part, x[p]);
        if (lane % 4 < 2) of_half[(i * all_parts + part) * tile_rows + lane / 4 + lane % 4 * 8] = sum;
      }
    }
    __syncthreads();
#pragma unroll 1
    for (u32 i = base + params.places; i < min(base + here + params.places, count); i++) bring(i);
    if (warp * lanes < here * tile_rows) {
      const u32 i = min(threadIdx.x / tile_rows, here - 1), r = threadIdx.x % tile_rows;
      const float total = sum_of_parts(of_half + i * all_parts * tile_rows, all_parts, r);
      const float up = __shfl_sync(everyone, total, lane / tile_rows * tile_rows + r % 8 + 8);
      if (threadIdx.x < here * tile_rows) keep_output(params, place(base + i), r, total, up, met);
    }
  }
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

#define ROW_KERNEL(name, bits, parts, has_heads)                                    \
  KERNEL(row_##name##_##parts, OneRowParams, (copied_warps * lanes, copied_blocks), \
         (row_products<bits, parts, has_heads>))
#define ROW_KERNELS(name, bits, has_heads) ROW_KERNEL(name, bits, 1, has_heads) ROW_KERNEL(name, bits, 2, has_heads)
ROW_KERNELS(4, 4, false)
ROW_KERNELS(8, 8, false)
ROW_KERNELS(4_and_8, 0, false)
ROW_KERNELS(heads_4, 4, true)
ROW_KERNELS(heads_8, 8, true)
