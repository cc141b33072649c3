// Matrices as stored times many rows of f32 by the simdgroup's own 8 x 8 products.
//
// For whoever wants prefills faster than the same bits in any cut: the order in which these products add is the
// hardware's, so a row differs in its last bits from what matmul.metal makes of it. Rows do not depend on each other
// here either.
#include "weights.h"

// A threadgroup makes tile x tile of out, each of its four simdgroups a quarter. Grid of threadgroups: blocks of
// outputs, blocks of rows of x.
template <int bits>
kernel void matmul_tiles(constant ProductParams& params [[buffer(0)]], device const uchar* codes [[buffer(1)]],
                         device const uchar* scales [[buffer(2)]], device const uchar* biases [[buffer(3)]],
                         device const float* x [[buffer(4)]], device float* out [[buffer(5)]],
                         uint2 group [[threadgroup_position_in_grid]],
                         uint thread_index [[thread_index_in_threadgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr uint threads = tile_simdgroups * lanes, eight = 8, packs = tile / pack;
  threadgroup float rows[tile * tile];      // [row of x, column]
  threadgroup float weights[tile * tile];   // [output, column]
  threadgroup float products[tile * tile];  // [row of x, output]
  const Weights<bits> matrix = {codes, scales, biases, params.columns, params.group_shift, params.number};
  const uint first_row = group.y * tile, first_output = group.x * tile;
  const uint top = simdgroup / 2 * (tile / 2), left = simdgroup % 2 * (tile / 2);
  simdgroup_float8x8 sums[2][2];
  for (uint i = 0; i < 2; i++)
    for (uint j = 0; j < 2; j++) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (uint first = 0; first < params.columns; first += tile) {
    for (uint i = thread_index; i < tile * tile; i += threads) {
      const uint row = min(first_row + i / tile, params.n - 1), column = first + i % tile;
      rows[i] = column < params.columns ? x[ulong(row) * params.x_stride + column] : 0.0f;
    }
    for (uint i = thread_index; i < tile * packs; i += threads) {
      const uint row = min(first_output + i / packs, params.rows - 1), column = first + i % packs * pack;
      if (column < params.columns) {
        const Pack<bits> packed = pack_at(matrix, row, column);
        for (uint j = 0; j < pack; j++) weights[i * pack + j] = fma(packed.weights[j], packed.scale, packed.bias);
      } else {
        for (uint j = 0; j < pack; j++) weights[i * pack + j] = 0.0f;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint column = 0; column < tile; column += eight) {
      simdgroup_float8x8 a[2], b[2];
      for (uint i = 0; i < 2; i++) {
        simdgroup_load(a[i], rows + (top + i * eight) * tile + column, tile);
        simdgroup_load(b[i], weights + (left + i * eight) * tile + column, tile, ulong2(0, 0), true);
      }
      for (uint i = 0; i < 2; i++)
        for (uint j = 0; j < 2; j++) simdgroup_multiply_accumulate(sums[i][j], a[i], b[j], sums[i][j]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint i = 0; i < 2; i++)
    for (uint j = 0; j < 2; j++)
      simdgroup_store(sums[i][j], products + (top + i * eight) * tile + left + j * eight, tile);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index; i < tile * tile; i += threads) {
    const uint row = first_row + i / tile, output = first_output + i % tile;
    if (row < params.n && output < params.rows) out[ulong(row) * params.out_stride + output] = products[i];
  }
}
instantiate_alone("matmul_tiles", matmul_tiles)
