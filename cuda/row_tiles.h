// What kernels share that multiply rows by tiles in shared memory, where a launch has several matrices.
#pragma once
#include "copied.h"
#include "row_outputs.h"

// What a block of one row shares besides its tiles.
struct RowShared {
  DigitStage stages[copied_warps];
  float squares[row_threads / lanes];
  u64 arrivals[copied_places];
};

// Where a tile's rows lie.
template <class Params>
DEV TileRows rows_of_tile(const Params& params, const TilePlace& at, const TileShape& shape) {
  const bool is_pair = at.matrix == params.gated;
  return {shape, params.matrices[at.matrix], is_pair ? params.matrices[at.matrix + 1] : StoredMatrix{}, at.row,
          params.rows[at.matrix]};
}

// The norm of the lane's pack of a part, which the first block keeps.
DEV void norm_of_pack(const OneRowParams& params, u32 part, float factor, const float (&weights)[pack],
                      float (&numbers)[pack]) {
#pragma unroll
  for (u32 i = 0; i < pack; i++) numbers[i] = normed(numbers[i], factor, weights[i]);
  if (blockIdx.x > 0) return;
  float4* to = reinterpret_cast<float4*>(params.normed + part * part_columns + lane_of() % (lanes / 2) * pack);
  to[0] = make_float4(numbers[0], numbers[1], numbers[2], numbers[3]);
  to[1] = make_float4(numbers[4], numbers[5], numbers[6], numbers[7]);
}
