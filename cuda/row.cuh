// Matrices in groups of 64, times one row of f32, by tiles in shared memory.
#include "row_tiles.h"

// The gated norms of two heads that are the warp's parts, as gated_rms_norm has them, and the lane's pack of these.
// `weights` are those of the lane's numbers.
constexpr u32 head_numbers = part_columns / lanes;
DEV void gated_heads(const OneRowParams& params, u32 first_part, u32 all_parts, const float (&weights)[pack],
                     DigitStage& stage, float (&numbers)[pack]) {
  float x[copied_parts][head_numbers], z[copied_parts * head_numbers], factors[copied_parts];
  float* heads = reinterpret_cast<float*>(stage);
  const auto at = [&](u32 p, u32 c) {
    return min(first_part + p, all_parts - 1) * part_columns + lane_of() + c * lanes;
  };
#pragma unroll
  for (u32 p = 0; p < copied_parts; p++)
#pragma unroll
    for (u32 c = 0; c < head_numbers; c++) x[p][c] = params.x[at(p, c)], z[p * head_numbers + c] = params.z[at(p, c)];
  silu_of_all(z);
#pragma unroll
  for (u32 p = 0; p < copied_parts; p++) {
    float squares = 0.0f;
#pragma unroll
    for (u32 c = 0; c < head_numbers; c++) squares = fmaf(x[p][c], x[p][c], squares);
    factors[p] = 1.0f / sqrtf(warp_sum(squares) / float(part_columns) + params.eps);
  }
#pragma unroll
  for (u32 p = 0; p < copied_parts; p++)
#pragma unroll
    for (u32 c = 0; c < head_numbers; c++) {
      x[p][c] = x[p][c] * factors[p] * weights[c] * z[p * head_numbers + c];
      heads[p * part_columns + lane_of() + c * lanes] = x[p][c];
    }
  __syncwarp();
  if (blockIdx.x == 0) {
#pragma unroll
    for (u32 p = 0; p < copied_parts; p++)
#pragma unroll
      for (u32 c = 0; c < head_numbers; c++) params.normed[at(p, c)] = x[p][c];
  }
#pragma unroll
  for (u32 i = 0; i < pack; i++) numbers[i] = heads[lane_of() * pack + i];
}

// As matmul_one, bit for bit. `bits` is 0 where matrices of 4 and of 8 go together. Where x is
// heads, their gated norm comes first. Dynamic memory: places for tiles, and twice the parts of `together` tiles.
// Weights are on their way before the kernel waits for the one before it; nobody writes them.
template <u32 bits, bool has_heads>
DEV void row_products(const OneRowParams& params) {
  extern __shared__ uint4 room[];
  __shared__ RowShared shared;
  let_next_come();
  const auto shape_of = [&](u32 matrix) { return tile_shape(params.columns, bits ? bits : params.bits[matrix]); };
  const TilePlaces tiles =
      tile_places(room, tile_shape(params.columns, bits ? bits : 8u).bytes(), params.places, shared.arrivals);
  const u32 count = (params.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x, all_parts = params.columns / part_columns;
  const u32 of_tile = made_once(all_parts * tile_rows);  // sums
  const u32 warp = warp_of(), lane = lane_of();
  float* sums = reinterpret_cast<float*>(tiles.end());
  const auto place = [&](u32 i) { return tile_place(params, blockIdx.x + i * gridDim.x); };
  const auto rows_of = [&](u32 i) {
    const TilePlace at = place(i);
    return rows_of_tile(params, at, shape_of(at.matrix));
  };
  if (threadIdx.x == 0) tiles.prepare();
  __syncthreads();

  float numbers[pack], weights[pack];
  RowPart x[copied_parts];
  const LaneOfTile<bits ? bits : 8u> own(shape_of(0), warp * copied_parts, all_parts);
  // The part whose digits the lane helps to make. One that is not there is taken to be the last.
  const u32 first_part = warp * copied_parts, own_part = min(first_part + lane / (lanes / 2), all_parts - 1);
#pragma unroll 1
  for (u32 base = 0, half = 0, asked = 0; base < count; base += params.together, half ^= 1) {
    const u32 here = min(params.together, count - base), end = min(base + params.places, count);
    float* of_half = sums + half * params.together * of_tile;
    tiles.bring(asked, end, rows_of);
    asked = end;
    if (base == 0) {
      if (has_heads) {
#pragma unroll
        for (u32 c = 0; c < head_numbers; c++) weights[c] = params.heads[lane + c * lanes];
      } else if (params.weight) {
        pack_of_part(params.weight, own_part, weights);
      }
      wait_for_previous();
      if (!has_heads) pack_of_part(params.x, own_part, numbers);
    }
    Met met = {};
    if (threadIdx.x < here * tile_rows)
      met = load_met(params, place(base + threadIdx.x / tile_rows), threadIdx.x % tile_rows);
    if (base == 0) {
      if (has_heads)
        gated_heads(params, first_part, all_parts, weights, shared.stages[warp], numbers);
      else if (params.weight)
        norm_of_pack(params, own_part, norm_factor(params.x, params.columns, params.eps, shared.squares), weights,
                     numbers);
      make_parts(numbers, shared.stages[warp], x);
    }
    tiles.settle();
#pragma unroll 1
    for (u32 i = 0; i < here; i++) {
      tiles.await(base + i);
      const u8* tile = tiles.place(base + i);
      float* parts = of_half + i * of_tile;
      if constexpr (bits > 0) {
        parts_of_tile<bits>(tile, own, params.number, x, parts);
      } else {
        const u32 matrix = place(base + i).matrix;
        const TileShape shape = shape_of(matrix);
        if (params.bits[matrix] == 8)
          parts_of_tile<8>(tile, {shape, first_part, all_parts}, params.number, x, parts);
        else
          parts_of_tile<4>(tile, {shape, first_part, all_parts}, params.number, x, parts);
      }
    }
    __syncthreads();
    if (warp * lanes < here * tile_rows) {
      const u32 i = min(threadIdx.x / tile_rows, here - 1), r = threadIdx.x % tile_rows;
      const float total = sum_of_parts(of_half + i * of_tile, all_parts, r);
      const float up = __shfl_sync(everyone, total, lane / tile_rows * tile_rows + r % 8 + 8);
      if (threadIdx.x < here * tile_rows) keep_output(params, place(base + i), r, total, up, met);
    }
  }
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

// Blocks may have many registers: with 80 a thread in place of some 100 a chain of layers took a twelfth longer.
#define ROW_KERNEL(name, bits, has_heads) \
  KERNEL(row_##name, OneRowParams, (copied_warps * lanes), (row_products<bits, has_heads>))
ROW_KERNEL(4, 4, false)
ROW_KERNEL(8, 8, false)
ROW_KERNEL(4_and_8, 0, false)
ROW_KERNEL(heads_4, 4, true)
ROW_KERNEL(heads_8, 8, true)
