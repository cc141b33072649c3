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

// ---- One row of x ---------------------------------------------------------------------------------------------------

// The chain of a pack that is aligned to sixteen bytes. The words of two elements are loaded together.
DEV float chain_of_pack(const u8* elements, const float* x, u32 number) {
  const uint4* from = reinterpret_cast<const uint4*>(elements);
  const float4* of_x = reinterpret_cast<const float4*>(x);
  const uint4 low = from[0], high = number == number_f32 ? from[1] : low;
  const float4 first = of_x[0], second = of_x[1];
  const u32 words[pack] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  const float numbers[pack] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
  float sum = 0.0f;
#pragma unroll
  for (u32 i = 0; i < pack; i++) {
    const u16 half = u16(words[i / 2] >> (i % 2 * 16));
    const float weight = number == number_f32    ? __uint_as_float(words[i])
                         : number == number_bf16 ? bf16(half)
                                                 : f16(half);
    sum = fmaf(weight, numbers[i], sum);
  }
  return sum;
}

// As add_plain, bit for bit, by a block: what add_plain has in a loop of one warp, its warps make side by side. `tiles`
// are the outputs of a block. Grid of blocks: blocks of outputs, 1, the products of a batch.
DEV void matmul_plain_row(const ProductParams& params) {
  constexpr u32 warps = row_threads / lanes, turns = 32;  // packs of a lane, whose sums are in shared memory together
  __shared__ float sums[turns * plain_outputs][lanes];
  begin_kernel();
  const u32 lane = lane_of(), warp = warp_of(), outputs = params.tiles, first = blockIdx.x * outputs;
  const u32 columns = params.columns, all = (columns + lanes * pack - 1) / (lanes * pack);
  const u32 bytes = bytes_of(params.number);
  const float* x = params.x + blockIdx.z * params.x_batch;
  const u8* matrix = params.matrix.codes + u64(blockIdx.z) * params.batch_rows * columns * bytes;
  const bool in_sixteens =
      columns % pack == 0 && reinterpret_cast<u64>(params.matrix.codes) % 16 == 0 && reinterpret_cast<u64>(x) % 16 == 0;
  const auto column_of = [&](u32 turn) { return (turn * lanes + lane) * pack; };
  float total = 0.0f;
#pragma unroll 1
  for (u32 base = 0; base < all; base += turns) {
    const u32 here = min(turns, all - base);
    const auto row_of = [&](u32 unit) { return u64(min(first + unit / here, params.rows - 1)) * columns; };
    if (base > 0) __syncthreads();
    if (in_sixteens) {
#pragma unroll 4
      for (u32 unit = warp; unit < here * outputs; unit += warps) {
        const u32 column = min(column_of(base + unit % here), columns - pack);
        sums[unit][lane] = chain_of_pack(matrix + (row_of(unit) + column) * bytes, x + column, params.number);
      }
    } else {
#pragma unroll 1
      for (u32 unit = warp; unit < here * outputs; unit += warps) {
        float sum = 0.0f;
        const u32 column = column_of(base + unit % here);
#pragma unroll 1
        for (u32 i = column; i < min(column + pack, columns); i++)
          sum = fmaf(number_at(matrix, row_of(unit) + i, params.number), x[i], sum);
        sums[unit][lane] = sum;
      }
    }
    __syncthreads();
    if (warp < outputs) {
#pragma unroll 4
      for (u32 turn = 0; turn < here; turn++)
        if (column_of(base + turn) < columns) total += sums[warp * here + turn][lane];
    }
  }
  total = warp_sum(total);
  if (warp < outputs && lane == 0 && first + warp < params.rows)
    params.out[blockIdx.z * params.out_batch + first + warp] = total;
}
