// Rows of a matrix as stored, as numbers: embeddings, and products with the transposed matrix.
#include "decoded.h"
#include "products.h"

// Eight weights of a row from `column` on. bits = 0: plain elements.
template <u32 bits>
DEV void weights_at(const StoredMatrix& matrix, const Storage& stored, u64 row, u32 column, float (&weights)[pack]) {
  if constexpr (bits == 0) {
#pragma unroll
    for (u32 i = 0; i < pack; i++)
      weights[i] = column + i < stored.columns
                       ? number_at(matrix.codes, row * stored.columns + column + i, stored.number)
                       : 0.0f;
  } else if constexpr (is_decoded(bits)) {
    const Decoded decoded = decoded_at<bits>(matrix, stored, row, column, within_block<bits>(column));
#pragma unroll
    for (u32 i = 0; i < pack; i++) weights[i] = fmaf(decoded.weights[i], decoded.scale, decoded.least);
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

#define ROW_KERNELS(bits) NAMED_KERNELS(bits, bits)
#define NAMED_KERNELS(name, bits)                                                            \
  KERNEL(matmul_transposed_##name, ProductParams, (flat_threads), (matmul_transposed<bits>)) \
  KERNEL(embed_##name, EmbedParams, (flat_threads), (embed<bits>))
FOR_ALL_BITS(ROW_KERNELS)
FOR_DECODED(NAMED_KERNELS)

ROW_KERNELS(0)
