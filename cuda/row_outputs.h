// The outputs of a launch that multiplies one row of x with some matrices: which output a tile has, and what becomes of
// it.
#pragma once
#include "products.h"

// The first output of a tile, of one row of x or of some.
struct TilePlace {
  u32 matrix;
  u32 row;
};
template <class Params>
DEV TilePlace tile_place(const Params& params, u32 tile) {
  u32 matrix = 0;
#pragma unroll
  for (u32 j = 1; j < most_outputs; j++) matrix += tile >= params.first_tile[j];
  u32 rows = tile_rows;
  if (params.gated != no_output && matrix == params.gated + 1) matrix = params.gated;  // their tiles are the first's
  if (matrix == params.gated) rows = tile_rows / 2;                                    // so many of each
  return {matrix, (tile - params.first_tile[matrix]) * rows};
}
// Of which matrix, and which of its rows, row `r` of the tile is. Behind the last it is the last again.
DEV TilePlace row_in_tile(const OneRowParams& params, const TilePlace& at, u32 r) {
  const bool is_pair = at.matrix == params.gated;
  const u32 matrix = is_pair && r >= tile_rows / 2 ? at.matrix + 1 : at.matrix;
  return {matrix, min(at.row + (is_pair ? r % (tile_rows / 2) : r), params.rows[at.matrix] - 1)};
}

// What an output meets, loaded before it is there.
struct Met {
  float residual;
  float taps[4];
  float before[3];  // what the convolution has kept
};
DEV Met load_met(const OneRowParams& params, const TilePlace& at, u32 r) {
  Met met = {};
  const u32 row = at.row + r;
  if (row >= params.rows[at.matrix]) return met;
  if (params.residual) met.residual = params.residual[row];
  if (params.taps == nullptr || at.matrix != 0) return met;
#pragma unroll
  for (u32 i = 0; i < 4; i++) met.taps[i] = params.taps[u64(row) * 4 + i];
#pragma unroll
  for (u32 i = 0; i < 3; i++) met.before[i] = params.tap_rows[u64(i) * params.rows[0] + row];
  return met;
}

// Output `r` of a tile, r below tile_rows; `up` is the one that SwiGLU takes with it.
DEV void keep_output(const OneRowParams& params, const TilePlace& at, u32 r, float total, float up, const Met& met) {
  if (at.matrix == params.gated) {
    const u32 half = tile_rows / 2, row = at.row + r % half;
    if (row < params.rows[at.matrix]) params.out[at.matrix + r / half][row] = r < half ? silu(total) * up : total;
    return;
  }
  const u32 row = at.row + r;
  if (row >= params.rows[at.matrix]) return;
  params.out[at.matrix][row] = total;
  if (params.residual) params.residual[row] = met.residual + total;
  if (params.taps == nullptr || at.matrix != 0) return;
  float sum = 0.0f;  // as conv1d has it
#pragma unroll
  for (u32 i = 0; i < 3; i++) sum = fmaf(met.before[i], met.taps[i], sum);
  params.convolved[row] = silu(fmaf(total, met.taps[3], sum));
  params.tap_rows[row] = met.before[1];
  params.tap_rows[u64(params.rows[0]) + row] = met.before[2];
  params.tap_rows[u64(2) * params.rows[0] + row] = total;
}
