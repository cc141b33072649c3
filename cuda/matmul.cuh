// Matrices as stored, times rows of f32; and single rows of matrices.
#include "products.h"

DEV Storage storage_of(const ProductParams& params) { return {params.columns, params.group_steps, params.number}; }

// out[r] = W[r] . x. Blocks go through tiles of rows. Grid of blocks: any number, 1, the products of a batch.
template <u32 bits>
DEV void matmul_one(const ProductParams& params) {
  __shared__ OneRow shared;
  begin_kernel();
  const Storage stored = storage_of(params);
  const float* x = params.x + blockIdx.z * params.x_batch;
  float* out = params.out + blockIdx.z * params.out_batch;
  const u64 above = u64(blockIdx.z) * params.batch_rows;  // rows of the stack that belong to other products
  const u32 g = lane_of() / 4, tiles = (params.rows + tile_rows - 1) / tile_rows;
  for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    TwoRows<bits> rows;
    rows.set(0, stored, params.matrix, above + min(tile * tile_rows + g, params.rows - 1));
    rows.set(1, stored, params.matrix, above + min(tile * tile_rows + g + 8, params.rows - 1));
    const float total = outputs_of_one<bits>(rows, stored, x, shared, tile != blockIdx.x);
    const u32 row = tile * tile_rows + threadIdx.x;
    if (threadIdx.x < tile_rows && row < params.rows) out[row] = total;
  }
}

// Grid of blocks: tiles of rows, blocks of rows of x, the products of a batch.
template <u32 bits, u32 fragments>
DEV void matmul_some(const ProductParams& params) {
  __shared__ SomeRows<fragments> shared;
  begin_kernel();
  constexpr u32 width = fragments * fragment_rows;
  const Storage stored = storage_of(params);
  const u32 g = lane_of() / 4, tile = blockIdx.x, first = blockIdx.y * width;
  const u64 above = u64(blockIdx.z) * params.batch_rows;
  const u64 block = u64(blockIdx.z) * params.batch_fragments + blockIdx.y * fragments;
  float* out = params.out + blockIdx.z * params.out_batch;
  TwoRows<bits> rows;
  rows.set(0, stored, params.matrix, above + min(tile * tile_rows + g, params.rows - 1));
  rows.set(1, stored, params.matrix, above + min(tile * tile_rows + g + 8, params.rows - 1));
  outputs_of_some<bits, fragments>(rows, stored, params.digits, params.groups, block, shared);
  for (u32 i = threadIdx.x; i < tile_rows * width; i += blockDim.x) {
    const u32 row = tile * tile_rows + i % tile_rows, at = first + i / tile_rows;
    if (row < params.rows && at < params.n)
      out[u64(at) * params.out_stride + row] = shared.totals[i % tile_rows][i / tile_rows];
  }
}

// Of plain elements. A warp makes plain_outputs outputs of some rows of x. Grid of blocks: blocks of outputs, blocks of
// rows, the products of a batch.
template <u32 some>
DEV void matmul_plain(const ProductParams& params) {
  begin_kernel();
  const u32 first = (blockIdx.x * plain_warps + warp_of()) * plain_outputs;
  if (first >= params.rows) return;
  const u64 above = u64(blockIdx.z) * params.batch_rows;
  const float* x[some];
#pragma unroll
  for (u32 r = 0; r < some; r++)
    x[r] = params.x + blockIdx.z * params.x_batch + u64(min(blockIdx.y * some + r, params.n - 1)) * params.x_stride;
  float result[some][plain_outputs];
  add_plain(params.matrix.codes, storage_of(params), above + first, above + params.rows - 1, x, result);
  if (lane_of() > 0) return;
  float* out = params.out + blockIdx.z * params.out_batch;
#pragma unroll
  for (u32 r = 0; r < some; r++)
#pragma unroll
    for (u32 o = 0; o < plain_outputs; o++) {
      const u32 row = blockIdx.y * some + r;
      if (row < params.n && first + o < params.rows) out[u64(row) * params.out_stride + first + o] = result[r][o];
    }
}

// ---- Whole rows of a matrix -----------------------------------------------------------------------------------------

// Eight weights of a row from `column` on. bits = 0: plain elements.
template <u32 bits>
DEV void weights_at(const StoredMatrix& matrix, const Storage& stored, u64 row, u32 column, float (&weights)[pack]) {
  if constexpr (bits == 0) {
#pragma unroll
    for (u32 i = 0; i < pack; i++)
      weights[i] = column + i < stored.columns
                       ? number_at(matrix.codes, row * stored.columns + column + i, stored.number)
                       : 0.0f;
  } else {
    const u64 group = row * stored.groups() + column / (stored.group_steps * step_columns);
    const float scale = number_at(matrix.scales, group, stored.number),
                bias = number_at(matrix.biases, group, stored.number);
    const uint2 codes = codes_of<bits>(matrix.codes + (row * (stored.columns / pack) + column / pack) * bits);
#pragma unroll
    for (u32 i = 0; i < pack; i++)
      weights[i] = fmaf(float((i % 2 ? codes.y : codes.x) >> (i / 2 * 8) & 255u), scale, bias);
  }
}

// out[i][c] = sum over the rows r of x[i][r] * W[r][c]: one chain for each output. A thread has eight columns of one
// row of x. Grid of threads: packs of columns, rows of x, the products of a batch.
template <u32 bits>
DEV void matmul_transposed(const ProductParams& params) {
  begin_kernel();
  const u32 column = (blockIdx.x * blockDim.x + threadIdx.x) * pack;
  if (column >= params.columns) return;
  const float* x = params.x + blockIdx.z * params.x_batch + u64(blockIdx.y) * params.x_stride;
  float* out = params.out + blockIdx.z * params.out_batch + u64(blockIdx.y) * params.out_stride;
  float sums[pack] = {};
  for (u32 r = 0; r < params.rows; r++) {
    float weights[pack];
    weights_at<bits>(params.matrix, storage_of(params), u64(blockIdx.z) * params.batch_rows + r, column, weights);
#pragma unroll
    for (u32 i = 0; i < pack; i++) sums[i] = fmaf(x[r], weights[i], sums[i]);
  }
#pragma unroll
  for (u32 i = 0; i < pack; i++)
    if (column + i < params.columns) out[column + i] = sums[i];
}

// Rows of the table by their ids. A thread has eight columns. Grid of threads: packs of columns, ids.
template <u32 bits>
DEV void embed(const EmbedParams& params) {
  begin_kernel();
  const u32 column = (blockIdx.x * blockDim.x + threadIdx.x) * pack;
  if (column >= params.columns) return;
  float weights[pack];
  weights_at<bits>(params.table, {params.columns, params.group_steps, params.number}, u64(params.ids[blockIdx.y]),
                   column, weights);
  float* out = params.out + u64(blockIdx.y) * params.columns + column;
#pragma unroll
  for (u32 i = 0; i < pack; i++)
    if (column + i < params.columns) out[i] = weights[i];
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

constexpr u32 product_threads = product_warps * lanes, few = few_rows / fragment_rows, many = many_rows / fragment_rows;

#define AFFINE_KERNELS(bits)                                                                                           \
  extern "C" __global__ void __launch_bounds__(product_threads) matmul_one_##bits(const ProductParams params) {        \
    matmul_one<bits>(params);                                                                                          \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(product_threads) matmul_few_##bits(const ProductParams params) {        \
    matmul_some<bits, few>(params);                                                                                    \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(product_threads) matmul_many_##bits(const ProductParams params) {       \
    matmul_some<bits, many>(params);                                                                                   \
  }                                                                                                                    \
  extern "C" __global__ void matmul_transposed_##bits(const ProductParams params) { matmul_transposed<bits>(params); } \
  extern "C" __global__ void embed_##bits(const EmbedParams params) { embed<bits>(params); }
FOR_ALL_BITS(AFFINE_KERNELS)

extern "C" __global__ void matmul_one_0(const ProductParams params) { matmul_plain<1>(params); }
extern "C" __global__ void matmul_few_0(const ProductParams params) { matmul_plain<plain_rows>(params); }
extern "C" __global__ void matmul_transposed_0(const ProductParams params) { matmul_transposed<0>(params); }
extern "C" __global__ void embed_0(const EmbedParams params) { embed<0>(params); }
