// Matrices as stored, times several rows of f32; those of plain elements, times any number of rows.
#include "many.h"
#include "plain.h"

// Grid of blocks: tiles of rows, blocks of rows of x, the products of a batch.
template <u32 bits, u32 steps>
DEV void matmul_few(const ProductParams& params) {
  __shared__ SomeRows shared;
  let_next_come();
  const Storage stored = storage_of(params);
  const OutputPlace at = output_of_tile(params, blockIdx.x);
  const u32 g = lane_of() / 4, first = blockIdx.y * few_rows;
  const u64 above = u64(blockIdx.z) * params.batch_rows;
  const u64 block = u64(blockIdx.z) * params.batch_fragments + blockIdx.y;
  TwoRows<bits> rows;
  rows.set(0, stored, at.matrix, above + min(at.row + g, at.rows - 1));
  rows.set(1, stored, at.matrix, above + min(at.row + g + 8, at.rows - 1));
  outputs_of_some<bits, steps>(rows, stored, params.digits, params.groups, block, params.n - first, shared,
                               [] { wait_for_previous(); });
  float* out = at.out + blockIdx.z * params.out_batch;
  for (u32 i = threadIdx.x; i < tile_rows * few_rows; i += blockDim.x) {
    const u32 row = at.row + i % tile_rows, place = first + i / tile_rows;
    if (row < at.rows && place < params.n)
      out[u64(place) * at.out_stride + row] = shared.totals[i % tile_rows][i / tile_rows];
  }
}

// A warp a tile. Grid of blocks: many_warps tiles of rows, blocks of rows of x, the products of a batch.
template <u32 bits, u32 steps>
DEV void matmul_many(const ProductParams& params) {
  __shared__ PartFor<bits, steps> shared[many_stages];
  let_next_come();
  const Storage stored = storage_of(params);
  const u32 g = lane_of() / 4, t = lane_of() % 4, first = blockIdx.y * many_rows;
  const OutputPlace at = output_of_tile(params, blockIdx.x * many_warps + warp_of());
  const u64 above = u64(blockIdx.z) * params.batch_rows;
  const u64 block = u64(blockIdx.z) * params.batch_fragments + blockIdx.y * many_fragments;
  const ManyRows x = {params.digits, params.groups, block, fragments_of(min(params.n - first, many_rows))};
  TwoRows<bits> rows;
  rows.set(0, stored, at.matrix, above + min(at.row + g, at.rows - 1));
  rows.set(1, stored, at.matrix, above + min(at.row + g + 8, at.rows - 1));
  ManySums totals;
  outputs_of_many<bits, steps>(stored, x, shared, rows, [] { wait_for_previous(); }, totals);
  float* out = at.out + blockIdx.z * params.out_batch;
#pragma unroll
  for (u32 f = 0; f < many_fragments; f++)
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const u32 row = at.row + g + i / 2 * 8, place = first + f * fragment_rows + 2 * t + i % 2;
      if (row < at.rows && place < params.n) out[u64(place) * at.out_stride + row] = totals.of[f][i];
    }
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

#define FEW_KERNEL(name, bits, steps) \
  KERNEL(matmul_few_##name, ProductParams, (one_warps * lanes), (matmul_few<bits, steps>))
FOR_ALL_FORMATS(FEW_KERNEL)
#define MANY_KERNEL(name, bits, steps) \
  KERNEL(matmul_many_##name, ProductParams, (many_threads, many_blocks), (matmul_many<bits, steps>))
FOR_KNOWN_FORMATS(MANY_KERNEL)

KERNEL(matmul_each_0, ProductParams, (plain_warps * lanes), (matmul_plain<0, plain_outputs, 1>))
KERNEL(matmul_few_0, ProductParams, (plain_warps * lanes), (matmul_plain<0, plain_outputs, plain_rows>))
