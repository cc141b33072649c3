// Matrices as stored, times several rows of f32; those of plain elements, times any number of rows.
#include "many.h"
#include "plain.h"

// Grid of blocks: blocks that go through tiles of rows, blocks of rows of x, the products of a batch.
template <u32 bits, u32 steps>
DEV void matmul_few(const ProductParams& params) {
  __shared__ SomeRows shared;
  let_next_come();
  const Storage stored = storage_of(params);
  const u32 g = lane_of() / 4, first = blockIdx.y * few_rows;
  const u64 above = u64(blockIdx.z) * params.batch_rows;
  const u64 block = u64(blockIdx.z) * params.batch_fragments + blockIdx.y;
  const auto tile = [&](u32 i) { return output_of_tile(params, blockIdx.x + i * gridDim.x); };
  const auto rows_of = [&](u32 i) {
    const OutputPlace at = tile(i);
    TwoRows<bits> rows;
    rows.set(0, stored, at.matrix, above + min(at.row + g, at.rows - 1));
    rows.set(1, stored, at.matrix, above + min(at.row + g + 8, at.rows - 1));
    return rows;
  };
  const auto out = [&](u32 i, u32 row, u32 place, float sum) {
    const OutputPlace at = tile(i);
    if (at.row + row < at.rows && first + place < params.n)
      at.out[blockIdx.z * params.out_batch + u64(first + place) * at.out_stride + at.row + row] = sum;
  };
  const u32 count = (params.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;
  outputs_of_some<bits, steps>(
      stored, count, rows_of, params.digits, params.groups, block, params.n - first, shared,
      [] { wait_for_previous(); }, out);
}

// Asks the L2 cache for all of a warp's tile, but for a few bytes of its scales that are no sixteen. What a warp loads
// ahead of its products is too little to wait for memory.
template <u32 bits>
DEV void ask_for_tile(const OutputPlace& at, u64 row, const Storage& stored) {
  const auto ask = [](const u8* from, u32 bytes) {
    const u64 first = reinterpret_cast<u64>(from) / 16 * 16;
    if (bytes >= 16) prefetch_bytes(reinterpret_cast<const u8*>(first), bytes / 16 * 16);
  };
  const u32 rows = min(tile_rows, at.rows - at.row);
  const u32 row_bytes = stored.columns / 8 * bits, scale_bytes = stored.groups() * u32(sizeof(u16));
  ask(at.matrix.codes + row * row_bytes, rows * row_bytes);
  ask(at.matrix.scales + row * scale_bytes, rows * scale_bytes);
  ask(at.matrix.biases + row * scale_bytes, rows * scale_bytes);
}

// A warp a tile. Grid of blocks: as many tiles of rows as a block has warps, blocks of rows of x, the products of a
// batch.
template <u32 bits, u32 steps, u32 fragments>
DEV void matmul_many(const ProductParams& params) {
  extern __shared__ uint4 space[];
  let_next_come();
  const Storage stored = storage_of(params);
  const u32 g = lane_of() / 4, t = lane_of() % 4, first = blockIdx.y * fragments * fragment_rows;
  const OutputPlace at = output_of_tile(params, blockIdx.x * many_warps + warp_of());
  const u64 above = u64(blockIdx.z) * params.batch_rows;
  const u64 block = u64(blockIdx.z) * params.batch_fragments + blockIdx.y * fragments;
  const ManyRows x = {params.digits, params.groups, block, min(fragments, fragments_of(params.n - first))};
  TwoRows<bits> rows;
  rows.set(0, stored, at.matrix, above + min(at.row + g, at.rows - 1));
  rows.set(1, stored, at.matrix, above + min(at.row + g + 8, at.rows - 1));
  if (is_whole<bits, steps>() && blockIdx.y == 0 && at.row < at.rows && lane_of() == 0)
    ask_for_tile<bits>(at, above + at.row, stored);
  ManySums<fragments> totals;
  outputs_of_many<bits, steps, fragments, is_whole<bits, steps>()>(
      stored, x, space, rows, [] { wait_for_previous(); }, totals);
  float* out = at.out + blockIdx.z * params.out_batch;
#pragma unroll
  for (u32 f = 0; f < fragments; f++)
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const u32 row = at.row + g + i / 2 * 8, place = first + f * fragment_rows + 2 * t + i % 2;
      if (row < at.rows && place < params.n) out[u64(place) * at.out_stride + row] = totals.of[f][i];
    }
}

template <u32 bits, u32 steps>
constexpr u32 blocks_of_many = is_whole<bits, steps>() ? most_blocks : many_blocks;

// ---- Kernels --------------------------------------------------------------------------------------------------------

#define FEW_KERNEL(name, bits, steps) \
  KERNEL(matmul_few_##name, ProductParams, (one_warps * lanes), (matmul_few<bits, steps>))
FOR_ALL_FORMATS(FEW_KERNEL)
#define MANY_KERNEL(name, bits, steps)                                                   \
  KERNEL(matmul_many_##name, ProductParams, (many_threads, blocks_of_many<bits, steps>), \
         (matmul_many<bits, steps, many_fragments>))                                     \
  KERNEL(matmul_most_##name, ProductParams, (many_threads, most_blocks), (matmul_many<bits, steps, most_fragments>))
FOR_KNOWN_FORMATS(MANY_KERNEL)

KERNEL(matmul_each_0, ProductParams, (row_threads), matmul_plain_row)
KERNEL(matmul_few_0, ProductParams, (plain_warps * lanes), (matmul_plain<0, plain_outputs, plain_rows>))
