// Matrices in groups of 64, times some rows of f32 as digits, by tiles in shared memory: each tile comes there once for
// all rows. Bit for bit as products of one row.
#include "row_tiles.h"

constexpr u32 part_groups = part_steps / copied_steps;

// What a warp needs of eight rows of x in its two parts: digits as the tensor core takes them, and groups of rows 2 t
// and 2 t + 1.
struct EightRows {
  uint2 digits[copied_parts][part_steps][digits_of_number];
  float4 groups[copied_parts][part_groups];

  // Those of a fragment. Digits of rows that are not there are taken to be zeros.
  DEV void load(const RowsParams& params, u32 fragment, u32 first_part) {
    const u32 lane = lane_of(), steps = params.columns / step_columns;
    const bool is_there = fragment * fragment_rows + lane / 4 < params.n;
    const DigitGroup* from_groups = params.groups + u64(fragment) * (steps / copied_steps) * fragment_rows;
    const uint2* from = reinterpret_cast<const uint2*>(params.digits) + lane;
#pragma unroll
    for (u32 p = 0; p < copied_parts; p++) {
      const u32 part = min(first_part + p, params.columns / part_columns - 1);
#pragma unroll
      for (u32 j = 0; j < part_steps; j++)
#pragma unroll
        for (u32 d = 0; d < digits_of_number; d++)
          digits[p][j][d] = is_there ? from[digits_at(fragment, steps, part * part_steps + j, d)] : make_uint2(0, 0);
#pragma unroll
      for (u32 i = 0; i < part_groups; i++)
        groups[p][i] =
            *reinterpret_cast<const float4*>(from_groups + (part * part_groups + i) * fragment_rows + lane % 4 * 2);
    }
  }
};

struct RowsShared {
  u64 arrivals[copied_places];
};

// Parts of a tile, as [part][row of the tile][row of x]; a part's are so far apart, so that writes of lanes meet other
// banks.
constexpr u32 rows_of_part = tile_rows * few_rows;

// Both parts side by side, so that one's products run while the other's are added up.
template <u32 bits>
DEV void parts_of_rows(const u8* tile, const TileShape& shape, u32 first_part, u32 all_parts, u32 number, int zero,
                       const EightRows& x, float* parts) {
  const u32 g = lane_of() / 4, t = lane_of() % 4;
  const int zeros[4] = {zero, zero, zero, zero};  // which is shifted
  constexpr u32 group_bytes = part_columns / part_groups / 8 * bits;
  Codes<bits> codes[copied_parts][2][part_steps];
  u32 scales[copied_parts][2], biases[copied_parts][2];
#pragma unroll
  for (u32 p = 0; p < copied_parts; p++) {
    const u32 part = min(first_part + p, all_parts - 1);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      const u32 row = g + i * 8;
#pragma unroll
      for (u32 group = 0; group < part_groups; group++) {
        Codes<bits> two[copied_steps];
        codes_together<bits, copied_steps>(
            tile + row * shape.row_bytes + (part * part_groups + group) * group_bytes + t * (copied_steps * bits), two);
#pragma unroll
        for (u32 j = 0; j < copied_steps; j++) codes[p][i][group * copied_steps + j] = two[j];
      }
      scales[p][i] = *reinterpret_cast<const u32*>(tile + shape.scales() + row * shape.scale_bytes + part * 4);
      biases[p][i] = *reinterpret_cast<const u32*>(tile + shape.biases() + row * shape.scale_bytes + part * 4);
    }
  }
  const bool is_bf16 = number == number_bf16;
  const auto number_in = [&](u32 two, u32 group) {
    const u16 own = u16(two >> (16 * group));
    const float wide = bf16(own), half = f16(own);
    return is_bf16 ? wide : half;
  };
  float sums[copied_parts][4] = {};
#pragma unroll
  for (u32 group = 0; group < part_groups; group++) {
    int c[copied_parts][digits_of_number][4];
#pragma unroll
    for (u32 j = group * copied_steps; j < (group + 1) * copied_steps; j++)
#pragma unroll
      for (u32 p = 0; p < copied_parts; p++) {
        const uint2 low = codes[p][0][j].bytes(), high = codes[p][1][j].bytes();
#pragma unroll
        for (u32 d = 0; d < digits_of_number; d++) {
          const uint2 digit = x.digits[p][j][d];
          if (j == group * copied_steps)
            multiply_bytes(c[p][d], low.x, high.x, low.y, high.y, digit.x, digit.y, zeros);
          else
            multiply_bytes(c[p][d], low.x, high.x, low.y, high.y, digit.x, digit.y);
        }
      }
#pragma unroll
    for (u32 p = 0; p < copied_parts; p++) {
      const float4 two = x.groups[p][group];
      const DigitGroup own[2] = {{two.x, two.y}, {two.z, two.w}};
#pragma unroll
      for (u32 i = 0; i < 4; i++) {  // row g, then g + 8, each with rows 2 t and 2 t + 1 of x
        const Scaling by = {number_in(scales[p][i / 2], group), number_in(biases[p][i / 2], group)};
        const float low = fmaf(unshifted(c[p][1][i]), 256.0f, unshifted(c[p][0][i]));
        sums[p][i] = with_group(sums[p][i], fmaf(unshifted(c[p][2][i]), 65536.0f, low), by, own[i % 2]);
      }
    }
  }
#pragma unroll
  for (u32 p = 0; p < copied_parts; p++)
#pragma unroll
    for (u32 i = 0; i < 2; i++)
      if (first_part + p < all_parts)
        *reinterpret_cast<float2*>(parts + (first_part + p) * rows_of_part + (g + i * 8) * few_rows + 2 * t) = {
            sums[p][2 * i], sums[p][2 * i + 1]};
}

// Output r of a tile, r below tile_rows, of row `place` of x: whether it is there, and where.
struct OutputOfRows {
  u32 matrix;
  u64 to;
  bool is_there;

  DEV OutputOfRows(const RowsParams& params, const TilePlace& at, u32 r, u32 place) {
    const bool is_pair = at.matrix == params.gated;
    const u32 half = tile_rows / 2, row = at.row + (is_pair ? r % half : r);
    matrix = is_pair ? at.matrix + r / half : at.matrix;
    to = u64(place) * params.out_stride[matrix] + row;
    is_there = row < params.rows[matrix];
  }
  DEV float residual(const RowsParams& params) const {
    return params.residual && is_there ? params.residual[to] : 0.0f;
  }
  // `up` is the one that SwiGLU takes with it, if `has_up`.
  DEV void keep(const RowsParams& params, float total, float up, bool has_up, float residual) const {
    if (!is_there) return;
    if (has_up) total = silu(total) * up;
    params.out[matrix][to] = total;
    if (params.residual) params.residual[to] = residual + total;
  }
};

// `bits` is 0 where matrices of 4 and of 8 go together. Grid of blocks: blocks that go through tiles, fragments. A warp
// has two parts of the columns. Dynamic memory: places for tiles, and the parts of `together` tiles, twice if a block
// has more.
template <u32 bits>
DEV void rows_products(const RowsParams& params) {
  extern __shared__ uint4 room[];
  __shared__ RowsShared shared;
  let_next_come();
  const auto shape_of = [&](u32 matrix) { return tile_shape(params.columns, bits ? bits : params.bits[matrix]); };
  const TilePlaces tiles =
      tile_places(room, tile_shape(params.columns, bits ? bits : 8u).bytes(), params.places, shared.arrivals);
  const u32 count = (params.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x, all_parts = params.columns / part_columns;
  const u32 of_tile = made_once(all_parts * rows_of_part), first_part = warp_of() * copied_parts;  // sums
  float* sums = reinterpret_cast<float*>(tiles.end());
  const auto place = [&](u32 i) { return tile_place(params, blockIdx.x + i * gridDim.x); };
  const auto rows_of = [&](u32 i) {
    const TilePlace at = place(i);
    return rows_of_tile(params, at, shape_of(at.matrix));
  };
  if (threadIdx.x == 0) tiles.prepare();
  __syncthreads();
  const int zero = int(shifted_zero + blockDim.y - 1);
  EightRows x;
#pragma unroll 1
  for (u32 base = 0, half = 0, asked = 0; base < count; base += params.together, half ^= 1) {
    const u32 here = min(params.together, count - base), end = min(base + params.places, count);
    float* of_half = sums + half * params.together * of_tile;
    tiles.bring(asked, end, rows_of);
    asked = end;
    if (base == 0) {
      wait_for_previous();
      x.load(params, blockIdx.y, first_part);
    }
    tiles.settle();
#pragma unroll 1
    for (u32 i = 0; i < here; i++) {
      tiles.await(base + i);
      const u8* tile = tiles.place(base + i);
      float* parts = of_half + i * of_tile;
      if constexpr (bits > 0) {
        parts_of_rows<bits>(tile, shape_of(0), first_part, all_parts, params.number, zero, x, parts);
      } else {
        const u32 matrix = place(base + i).matrix;
        if (params.bits[matrix] == 8)
          parts_of_rows<8>(tile, shape_of(matrix), first_part, all_parts, params.number, zero, x, parts);
        else
          parts_of_rows<4>(tile, shape_of(matrix), first_part, all_parts, params.number, zero, x, parts);
      }
    }
    __syncthreads();
#pragma unroll 1
    for (u32 at = threadIdx.x; at < here * rows_of_part; at += blockDim.x) {
      const u32 i = at / rows_of_part, r = at / few_rows % tile_rows;
      const u32 row_of_x = blockIdx.y * fragment_rows + at % few_rows;
      if (row_of_x >= params.n) continue;
      const TilePlace to = place(base + i);
      const OutputOfRows output(params, to, r, row_of_x);
      const float residual = output.residual(params);
      const bool has_up = to.matrix == params.gated && r < tile_rows / 2;
      const float* parts = of_half + i * of_tile + at % rows_of_part;
      const u32 up_at = has_up ? tile_rows / 2 * few_rows : 0;
      float total = 0.0f, up = 0.0f;
#pragma unroll 4
      for (u32 part = 0; part < all_parts; part++) {
        total += parts[part * rows_of_part];
        up += parts[part * rows_of_part + up_at];
      }
      output.keep(params, total, up, has_up, residual);
    }
  }
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

#define ROWS_KERNEL(name, bits) KERNEL(rows_##name, RowsParams, (copied_warps * lanes, 1), (rows_products<bits>))
ROWS_KERNEL(4, 4)
ROWS_KERNEL(8, 8)
ROWS_KERNEL(4_and_8, 0)
