// Matrices as stored, times several rows of f32; those of plain elements, times any number of rows.
#include "plain.h"
#include "products.h"

// Grid of blocks: tiles of rows, blocks of rows of x, the products of a batch.
template <u32 bits, u32 steps, u32 fragments>
DEV void matmul_some(const ProductParams& params) {
  __shared__ SomeRows<fragments> shared;
  let_next_come();
  constexpr u32 width = fragments * fragment_rows;
  const Storage stored = storage_of(params);
  const u32 g = lane_of() / 4, tile = blockIdx.x, first = blockIdx.y * width;
  const u64 above = u64(blockIdx.z) * params.batch_rows;
  const u64 block = u64(blockIdx.z) * params.batch_fragments + blockIdx.y * fragments;
  float* out = params.out + blockIdx.z * params.out_batch;
  TwoRows<bits> rows;
  rows.set(0, stored, params.matrix, above + min(tile * tile_rows + g, params.rows - 1));
  rows.set(1, stored, params.matrix, above + min(tile * tile_rows + g + 8, params.rows - 1));
  outputs_of_some<bits, steps, fragments>(rows, stored, params.digits, params.groups, block, params.n - first, shared,
                                          [] { wait_for_previous(); });
  for (u32 i = threadIdx.x; i < tile_rows * width; i += blockDim.x) {
    const u32 row = tile * tile_rows + i % tile_rows, at = first + i / tile_rows;
    if (row < params.rows && at < params.n)
      out[u64(at) * params.out_stride + row] = shared.totals[i % tile_rows][i / tile_rows];
  }
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

constexpr u32 product_threads = product_warps * lanes, few = few_rows / fragment_rows, many = many_rows / fragment_rows;

#define FEW_KERNEL(name, bits, steps)                                                                           \
  extern "C" __global__ void __launch_bounds__(product_threads) matmul_few_##name(const ProductParams params) { \
    matmul_some<bits, steps, few>(params);                                                                      \
  }
FOR_ALL_FORMATS(FEW_KERNEL)
#define MANY_KERNEL(name, bits, steps)                                                                           \
  extern "C" __global__ void __launch_bounds__(product_threads) matmul_many_##name(const ProductParams params) { \
    matmul_some<bits, steps, many>(params);                                                                      \
  }
FOR_KNOWN_FORMATS(MANY_KERNEL)

extern "C" __global__ void matmul_each_0(const ProductParams params) { matmul_plain<0, plain_outputs, 1>(params); }
extern "C" __global__ void matmul_few_0(const ProductParams params) {
  matmul_plain<0, plain_outputs, plain_rows>(params);
}
