// Products of matrices of plain elements (f32, f16, bf16), and of codes that become f32, with rows of f32:
// multiply-adds of f32 in a fixed order.
#pragma once
#include "decoded.h"
#include "products.h"

// A lane takes every 32nd pack of columns, in the order of the columns. A pack is a chain of multiply-adds, and the
// lanes are summed at the end. What one row of x yields is the same chain whatever rows are beside it. Multiplies the
// rows of the matrix from `first` on, none beyond `last`. Codes 0: plain elements.
template <u32 codes, u32 rows, u32 outputs>
DEV void add_plain(const StoredMatrix& matrix, const Storage& stored, u64 first, u64 last,
                   const float* const (&x)[rows], float (&result)[rows][outputs]) {
  for (u32 r = 0; r < rows; r++)
    for (u32 o = 0; o < outputs; o++) result[r][o] = 0.0f;
  const u32 within = within_block<codes>(lane_of() * pack);  // all lanes together have whole blocks
  for (u32 column = lane_of() * pack; column < stored.columns; column += lanes * pack) {
    float numbers[rows][pack];
    [[maybe_unused]] float sums[rows];
    const u32 count = codes ? pack : min(pack, stored.columns - column);
#pragma unroll
    for (u32 r = 0; r < rows; r++) {
      if (count == pack) {
        pack_of_x(x[r], column, stored.columns, numbers[r]);
      } else {
#pragma unroll
        for (u32 i = 0; i < pack; i++) numbers[r][i] = i < count ? x[r][column + i] : 0.0f;
      }
    }
    if constexpr (has_least<codes>()) {
#pragma unroll
      for (u32 r = 0; r < rows; r++) {
        sums[r] = 0.0f;
#pragma unroll
        for (u32 i = 0; i < pack; i++) sums[r] += numbers[r][i];
      }
    }
#pragma unroll
    for (u32 o = 0; o < outputs; o++) {
      const u64 row = min(first + o, last);
      Decoded weights;
      if constexpr (codes > 0) {
        weights = decoded_at<codes>(matrix, stored, row, column, within);
      } else {
        const u64 at = row * stored.columns + column;
#pragma unroll
        for (u32 i = 0; i < pack; i++)
          weights.weights[i] = i < count ? number_at(matrix.codes, at + i, stored.number) : 0.0f;
      }
#pragma unroll
      for (u32 r = 0; r < rows; r++) {
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < pack; i++) sum = fmaf(weights.weights[i], numbers[r][i], sum);
        result[r][o] = codes ? fmaf(weights.scale, sum, result[r][o]) : result[r][o] + sum;
        if constexpr (has_least<codes>()) result[r][o] = fmaf(weights.least, sums[r], result[r][o]);
      }
    }
  }
#pragma unroll
  for (u32 r = 0; r < rows; r++)
#pragma unroll
    for (u32 o = 0; o < outputs; o++) result[r][o] = warp_sum(result[r][o]);
}

// A warp makes some outputs of some rows of x. Grid of blocks: blocks of outputs, blocks of rows, the products of a
// batch.
template <u32 codes, u32 outputs, u32 some>
DEV void matmul_plain(const ProductParams& params) {
  begin_kernel();
  const u32 first = (blockIdx.x * plain_warps + warp_of()) * outputs;
  if (first >= params.rows) return;
  const u64 above = u64(blockIdx.z) * params.batch_rows;
  const float* x[some];
#pragma unroll
  for (u32 r = 0; r < some; r++)
    x[r] = params.x + blockIdx.z * params.x_batch + u64(min(blockIdx.y * some + r, params.n - 1)) * params.x_stride;
  float result[some][outputs];
  add_plain<codes>(params.matrix, storage_of(params), above + first, above + params.rows - 1, x, result);
  if (lane_of() > 0) return;
  float* out = params.out + blockIdx.z * params.out_batch;
#pragma unroll
  for (u32 r = 0; r < some; r++)
#pragma unroll
    for (u32 o = 0; o < outputs; o++) {
      const u32 row = blockIdx.y * some + r;
      if (row < params.n && first + o < params.rows) out[u64(row) * params.out_stride + first + o] = result[r][o];
    }
}
