// Matrices as stored, times one row of f32, or one row each.
#include "row_outputs.h"

// out[r] = W[r] . x, of some matrices. Blocks go through tiles of rows. All blocks make the norm of x if there is one,
// and the first one keeps it.
template <u32 bits, u32 steps>
DEV void matmul_one(const OneRowParams& params) {
  __shared__ OneRow shared;
  let_next_come();
  const Storage stored = {params.columns, params.group_steps, params.number};
  const u32 g = lane_of() / 4, count = (params.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;
  const auto place = [&](u32 i) { return tile_place(params, blockIdx.x + i * gridDim.x); };
  const auto rows_of = [&](u32 i) {
    const TilePlace at = place(i);
    TwoRows<bits> rows;
#pragma unroll
    for (u32 j = 0; j < 2; j++) {
      const TilePlace row = row_in_tile(params, at, g + j * 8);
      rows.set(j, stored, params.matrices[row.matrix], row.row);
    }
    return rows;
  };
  const auto x_when_there = [&] {
    wait_for_previous();
    if (params.weight == nullptr) return RowOfX{params.x, nullptr, 1.0f, nullptr};
    const float factor = norm_factor(params.x, params.columns, params.eps, shared.squares);
    return RowOfX{params.x, params.weight, factor, blockIdx.x == 0 ? params.normed : nullptr};
  };
  const auto out = [&](u32 i, u32 row, float total) {
    const TilePlace at = place(i);
    const float up = __shfl_sync(everyone, total, row % 8 + 8);
    if (row < tile_rows) keep_output(params, at, row, total, up, load_met(params, at, row));
  };
  outputs_of_one<bits, steps>(stored, count, shared, rows_of, x_when_there, out);
}

// The same for the products of a batch. If rows are short, each warp has a tile; else each block. Grid of blocks: tiles
// of rows, 1, products.
template <u32 bits, u32 steps>
DEV void matmul_each(const ProductParams& params) {
  __shared__ OneRow shared;
  let_next_come();
  const Storage stored = storage_of(params);
  const u64 above = u64(blockIdx.z) * params.batch_rows;  // rows of the stack that belong to other products
  const bool is_short = stored.parts() <= short_parts;
  const u32 g = lane_of() / 4, t = lane_of() % 4;
  const u32 first = (is_short ? blockIdx.x * (blockDim.x / lanes) + warp_of() : blockIdx.x) * tile_rows;
  const auto rows_of = [&](u32) {
    TwoRows<bits> rows;
    rows.set(0, stored, params.matrix, above + min(first + g, params.rows - 1));
    rows.set(1, stored, params.matrix, above + min(first + g + 8, params.rows - 1));
    return rows;
  };
  const auto out = [&](u32, u32 row, float total) {
    if (row < tile_rows && first + row < params.rows) params.out[blockIdx.z * params.out_batch + first + row] = total;
  };
  const auto x_when_there = [&] {
    wait_for_previous();
    return RowOfX{params.x + blockIdx.z * params.x_batch, nullptr, 1.0f, nullptr};
  };
  if (!is_short) return outputs_of_one<bits, steps>(stored, 1, shared, rows_of, x_when_there, out);
  TwoRows<bits> rows = rows_of(0);
  if (t & 1) rows.scales[0] = rows.scales[1], rows.biases[0] = rows.biases[1];
  const auto count_of = [&](u32 part) { return min(part_steps, stored.steps() - part * part_steps); };
  PartOfRows<bits, steps> next;
  next.load(rows, stored, 0, count_of(0), true, false);
  bring_digits(x_when_there(), stored, 0, stored.steps(), shared);
  __syncthreads();
  float total = 0.0f;
#pragma unroll 1
  for (u32 part = 0; part < stored.parts(); part++) {
    const PartOfRows<bits, steps> now = next;
    if (part + 1 < stored.parts()) next.load(rows, stored, (part + 1) * part_steps, count_of(part + 1), true, false);
    total += part_of_one<bits, steps>(now, stored, part * part_steps, count_of(part), shared);
  }
  if (t < 2) out(0, g + t * 8, total);
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

#define PRODUCT_KERNELS(name, bits, steps)                                                \
  KERNEL(matmul_one_##name, OneRowParams, (one_warps * lanes), (matmul_one<bits, steps>)) \
  KERNEL(matmul_each_##name, ProductParams, (one_warps * lanes), (matmul_each<bits, steps>))
FOR_ALL_FORMATS(PRODUCT_KERNELS)
