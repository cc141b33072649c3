// Products of matrices of plain elements (f32, f16, bf16) with rows of f32: multiply-adds of f32 in a fixed order.
#pragma once
#include "products.h"

// A lane takes every 32nd pack of columns, in the order of the columns. A pack is a chain of multiply-adds, and the
// lanes are summed at the end. What one row of x yields is the same chain whatever rows are beside it. Multiplies the
// rows of the matrix from `first` on, none beyond `last`.
template <u32 rows, u32 outputs>
DEV void add_plain(const u8* elements, const Storage& stored, u64 first, u64 last, const float* const (&x)[rows],
                   float (&result)[rows][outputs]) {
  for (u32 r = 0; r < rows; r++)
    for (u32 o = 0; o < outputs; o++) result[r][o] = 0.0f;
  for (u32 column = lane_of() * pack; column < stored.columns; column += lanes * pack) {
    float numbers[rows][pack];
    const u32 count = min(pack, stored.columns - column);
#pragma unroll
    for (u32 r = 0; r < rows; r++)
#pragma unroll
      for (u32 i = 0; i < pack; i++) numbers[r][i] = i < count ? x[r][column + i] : 0.0f;
#pragma unroll
    for (u32 o = 0; o < outputs; o++) {
      const u64 at = min(first + o, last) * stored.columns + column;
      float weights[pack];
#pragma unroll
      for (u32 i = 0; i < pack; i++) weights[i] = i < count ? number_at(elements, at + i, stored.number) : 0.0f;
#pragma unroll
      for (u32 r = 0; r < rows; r++) {
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < pack; i++) sum = fmaf(weights[i], numbers[r][i], sum);
        result[r][o] += sum;
      }
    }
  }
#pragma unroll
  for (u32 r = 0; r < rows; r++)
#pragma unroll
    for (u32 o = 0; o < outputs; o++) result[r][o] = warp_sum(result[r][o]);
}
