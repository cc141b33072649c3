// Matrices as stored, times rows of f32; and single rows of matrices. Kernels for packed codes and for blocks are in
// files of their own, because a model has the one or the other.
#pragma once
#include "weights.h"

// out[i][r] = W[r] . x[i]. A simdgroup makes outputs_of_simdgroup outputs for `rows` rows of x. Grid of threadgroups:
// blocks of outputs, blocks of rows, the products of a batch.
template <int bits, int rows>
kernel void matmul(constant ProductParams& params [[buffer(0)]], device const uchar* codes [[buffer(1)]],
                   device const uchar* scales [[buffer(2)]], device const uchar* biases [[buffer(3)]],
                   device const float* x [[buffer(4)]], device float* out [[buffer(5)]],
                   uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint first = (group.x * product_simdgroups + simdgroup) * outputs_of_simdgroup;
  if (first >= params.rows) return;
  const uint above = group.z * params.batch_rows;  // rows of the stack that belong to other products
  const Weights<bits> matrix = {codes, scales, biases, params.columns, params.group_shift, params.number};
  x += group.z * params.x_batch;
  out += group.z * params.out_batch;
  device const float* pointers[rows];
  for (int r = 0; r < rows; r++) pointers[r] = x + ulong(min(group.y * rows + uint(r), params.n - 1)) * params.x_stride;
  float result[rows][outputs_of_simdgroup];
  add_products(matrix, above + first, above + params.rows - 1, pointers, lane, result);
  for (int r = 0; r < rows; r++)
    for (uint o = 0; o < outputs_of_simdgroup; o++) {
      const float sum = simd_sum(result[r][o]);
      const uint row = group.y * rows + uint(r);
      if (lane == 0 && row < params.n && first + o < params.rows) out[ulong(row) * params.out_stride + first + o] = sum;
    }
}

// out[i][c] = sum over the rows r of x[i][r] * W[r][c]: one chain for each output. A thread has eight columns of one
// row of x. Grid of threads: packs of columns, rows of x, the products of a batch.
template <int bits>
kernel void matmul_transposed(constant ProductParams& params [[buffer(0)]], device const uchar* codes [[buffer(1)]],
                              device const uchar* scales [[buffer(2)]], device const uchar* biases [[buffer(3)]],
                              device const float* x [[buffer(4)]], device float* out [[buffer(5)]],
                              uint3 at [[thread_position_in_grid]]) {
  const uint column = at.x * pack;
  if (column >= params.columns) return;
  const Weights<bits> matrix = {codes, scales, biases, params.columns, params.group_shift, params.number};
  x += at.z * params.x_batch + ulong(at.y) * params.x_stride;
  out += at.z * params.out_batch + ulong(at.y) * params.out_stride;
  float sums[pack] = {};
  for (uint r = 0; r < params.rows; r++) {
    const Pack<bits> packed = pack_at(matrix, at.z * params.batch_rows + r, column);
    for (uint i = 0; i < pack; i++) sums[i] = fma(x[r], fma(packed.weights[i], packed.scale, packed.bias), sums[i]);
  }
  for (uint i = 0; i < min(pack, params.columns - column); i++) out[column + i] = sums[i];
}

// Rows of the table by their ids. A thread has eight columns. Grid of threads: packs of columns, ids.
template <int bits>
kernel void embed(constant EmbedParams& params [[buffer(0)]], device const uchar* codes [[buffer(1)]],
                  device const uchar* scales [[buffer(2)]], device const uchar* biases [[buffer(3)]],
                  device const int* ids [[buffer(4)]], device float* out [[buffer(5)]],
                  uint2 at [[thread_position_in_grid]]) {
  const uint column = at.x * pack;
  if (column >= params.columns) return;
  const Weights<bits> matrix = {codes, scales, biases, params.columns, params.group_shift, params.number};
  const Pack<bits> packed = pack_at(matrix, ulong(ids[at.y]), column);
  out += ulong(at.y) * params.columns + column;
  for (uint i = 0; i < min(pack, params.columns - column); i++)
    out[i] = fma(packed.weights[i], packed.scale, packed.bias);
}
