// Matrices as stored, times rows of f32; and single rows of matrices.
#include "plain.h"
#include "products.h"

DEV Storage storage_of(const ProductParams& params) { return {params.columns, params.group_steps, params.number}; }

// out[r] = W[r] . x, of some matrices. Blocks go through tiles of rows. All blocks make the norm of x if there is one,
// and the first one keeps it.
template <u32 bits, u32 steps>
DEV void matmul_one(const OneRowParams& params) {
  __shared__ OneRow shared;
  let_next_come();
  const Storage stored = {params.columns, params.group_steps, params.number};
  const u32 g = lane_of() / 4, count = (params.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;
  struct Place {
    u32 matrix;
    u32 row;
  };
  const auto place = [&](u32 i) {
    const u32 tile = blockIdx.x + i * gridDim.x;
    if (params.is_gated) return Place{0, tile * tile_rows / 2};  // so many rows of each
    u32 matrix = 0;
#pragma unroll
    for (u32 j = 1; j < most_outputs; j++) matrix += tile >= params.first_tile[j];
    return Place{matrix, (tile - params.first_tile[matrix]) * tile_rows};
  };
  const auto rows_of = [&](u32 i) {
    const Place at = place(i);
    const u32 last = params.rows[at.matrix] - 1;
    TwoRows<bits> rows;
    rows.set(0, stored, params.matrices[at.matrix], min(at.row + g, last));
    if (params.is_gated)
      rows.set(1, stored, params.matrices[1], min(at.row + g, last));
    else
      rows.set(1, stored, params.matrices[at.matrix], min(at.row + g + 8, last));
    return rows;
  };
  const auto x_when_there = [&] {
    wait_for_previous();
    if (params.weight == nullptr) return RowOfX{params.x, nullptr, 1.0f, nullptr};
    const float factor = norm_factor(params.x, params.columns, params.eps, shared.squares);
    return RowOfX{params.x, params.weight, factor, blockIdx.x == 0 ? params.normed : nullptr};
  };
  const auto out = [&](u32 i, u32 row, float total) {
    const Place at = place(i);
    if (params.is_gated) {
      const float up = __shfl_sync(everyone, total, row % 8 + 8);
      if (row < tile_rows && at.row + row % 8 < params.rows[0])
        params.out[row / 8][at.row + row % 8] = row < 8 ? silu(total) * up : total;
      return;
    }
    if (row >= tile_rows || at.row + row >= params.rows[at.matrix]) return;
    params.out[at.matrix][at.row + row] = total;
    if (params.residual) params.residual[at.row + row] = params.residual[at.row + row] + total;
  };
  outputs_of_one<bits, steps>(stored, count, shared, rows_of, x_when_there, out);
}

// The same for the products of a batch, each a tile of a block. Grid of blocks: tiles of rows, 1, products.
template <u32 bits, u32 steps>
DEV void matmul_each(const ProductParams& params) {
  __shared__ OneRow shared;
  let_next_come();
  const Storage stored = storage_of(params);
  const u64 above = u64(blockIdx.z) * params.batch_rows;  // rows of the stack that belong to other products
  const u32 g = lane_of() / 4, first = blockIdx.x * tile_rows;
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
  outputs_of_one<bits, steps>(stored, 1, shared, rows_of, x_when_there, out);
}

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
    const Scaling by =
        scaling_of<bits>(stored_number(matrix.scales, group, stored.number),
                         bits == e2m1 ? 0 : stored_number(matrix.biases, group, stored.number), stored.number);
    const uint2 codes =
        codes_at<bits>(matrix.codes + (row * (stored.columns / pack) + column / pack) * width_of(bits)).bytes();
#pragma unroll
    for (u32 i = 0; i < pack; i++)
      weights[i] = fmaf(float((i % 2 ? codes.y : codes.x) >> (i / 2 * 8) & 255u), by.scale, by.bias);
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

#define PRODUCT_KERNELS(name, bits, steps)                                                                        \
  extern "C" __global__ void __launch_bounds__(one_warps* lanes) matmul_one_##name(const OneRowParams params) {   \
    matmul_one<bits, steps>(params);                                                                              \
  }                                                                                                               \
  extern "C" __global__ void __launch_bounds__(one_warps* lanes) matmul_each_##name(const ProductParams params) { \
    matmul_each<bits, steps>(params);                                                                             \
  }                                                                                                               \
  extern "C" __global__ void __launch_bounds__(product_threads) matmul_few_##name(const ProductParams params) {   \
    matmul_some<bits, steps, few>(params);                                                                        \
  }
FOR_ALL_FORMATS(PRODUCT_KERNELS)
#define MANY_KERNEL(name, bits, steps)                                                                           \
  extern "C" __global__ void __launch_bounds__(product_threads) matmul_many_##name(const ProductParams params) { \
    matmul_some<bits, steps, many>(params);                                                                      \
  }
FOR_KNOWN_FORMATS(MANY_KERNEL)

#define ROW_KERNELS(bits)                                                                                              \
  extern "C" __global__ void matmul_transposed_##bits(const ProductParams params) { matmul_transposed<bits>(params); } \
  extern "C" __global__ void embed_##bits(const EmbedParams params) { embed<bits>(params); }
FOR_ALL_BITS(ROW_KERNELS)

extern "C" __global__ void matmul_each_0(const ProductParams params) { matmul_plain<1>(params); }
extern "C" __global__ void matmul_few_0(const ProductParams params) { matmul_plain<plain_rows>(params); }
extern "C" __global__ void matmul_transposed_0(const ProductParams params) { matmul_transposed<0>(params); }
extern "C" __global__ void embed_0(const EmbedParams params) { embed<0>(params); }
