// Experts that few rows of x chose: gate and up, or down, of one pair after the other, by tiles in shared memory. As
// the kernels that have one pair each, bit for bit.
//
// Pairs of one expert are neighbours in the list, so what one of them has read is in the L2 cache when the next one
// wants it. With the digits of two rows in registers the products took longer than that saved, and so they did where
// each warp had a tile of its own.
#include "copied.h"
#include "experts.h"
#include "tiles_params.h"

constexpr u32 tiles_places = 2;

struct TilesShared {
  DigitStage stages[tiles_warps];
  u64 arrivals[tiles_places];
};

// The tiles of all pairs lie one after the other, `together` of them as one, and a block has its share of these. So it
// has few pairs, and makes the digits of a pair's row once: a warp those of two parts of the columns, which it has in
// every tile. Where there are fewer parts than a block's warps have, a team of warps has a tile. Behind the pairs come
// the rows of the shared expert. Grid of blocks: as many as run at the same time. Dynamic memory: two places for tiles,
// and twice the parts of as many as are together.
template <u32 bits, bool is_double>
DEV void expert_tiles(const ExpertTilesParams& all) {
  extern __shared__ uint4 room[];
  __shared__ TilesShared shared;
  const ExpertParams& params = all.experts;
  constexpr u32 outputs = is_double ? tile_rows / 2 : tile_rows;
  const u32 warp = warp_of(), lane = lane_of(), warps = blockDim.x / lanes, together = all.together;
  const TileShape shape = tile_shape(params.columns, bits, together);
  const TilePlaces tiles = tile_places(room, shape.bytes(), tiles_places, shared.arrivals);
  const u32 all_parts = params.columns / part_columns, of_team = (all_parts + copied_parts - 1) / copied_parts;
  const u32 of_tile = made_once(all_parts * tile_rows), step = made_once(together * outputs);
  float* sums = reinterpret_cast<float*>(tiles.end());
  const u32 of_pair = (params.rows + step - 1) / step;
  const u64 total = u64(all.pairs + (is_double ? 0 : all.shared_rows)) * of_pair;
  const u32 begin = u32(total * blockIdx.x / gridDim.x), count = u32(total * (blockIdx.x + 1) / gridDim.x) - begin;
  const auto rows_of = [&](u32 i) {
    const u32 place = (begin + i) / of_pair, row = (begin + i - place * of_pair) * step;
    if (!is_double && place >= all.pairs) return TileRows{shape, all.shared, {}, row, params.rows};
    const u8* slot = params.blocks[place].slot;
    const StoredMatrix second = is_double ? matrix_of(slot, params.second) : StoredMatrix{};
    return TileRows{shape, matrix_of(slot, params.matrix), second, row, params.rows};
  };
  if (threadIdx.x == 0) tiles.prepare();
  begin_kernel();
  __syncthreads();
  tiles.bring(0, min(tiles_places, count), rows_of);
  const u32 team = warp / of_team, first_part = (warp - team * of_team) * copied_parts;
  const LaneOfTile<bits> own(shape, first_part, all_parts, is_double ? step : tile_rows / 2);
  const u32 teams = warps / of_team, first_tile = team < teams ? team : together;  // a warp may have no team
  const u32 to_next_codes = made_once(teams * outputs * shape.row_bytes);
  const u32 to_next_scale = made_once(teams * outputs * shape.scale_bytes);
  RowPart x[copied_parts];
  u32 place = begin / of_pair, row = (begin - place * of_pair) * step, expert = 0;
  float* out = nullptr;  // of the pair
  u32 turned = threadIdx.x;
#pragma unroll 1
  for (u32 i = 0; i < count; i++) {
    if (i == 0 || row == 0) {  // the next pair
      const float* from;
      if (is_double || place < all.pairs) {
        const u32 pair = params.pairs[params.blocks[place].first];
        expert = params.blocks[place].expert;
        from = params.x + u64(pair / params.k) * params.columns;
        out = params.out + u64(pair) * params.rows;
      } else {
        from = all.shared_x + u64(place - all.pairs) * params.columns;
        out = all.shared_out + u64(place - all.pairs) * params.rows;
      }
      float numbers[pack];
      pack_of_part(from, min(first_part + lane / (lanes / 2), all_parts - 1), numbers);
      make_parts(numbers, shared.stages[warp], x);
    }
    float* of_turn = sums + i % 2 * together * of_tile;
    tiles.settle();
    tiles.await(i);
    LaneOfTile<bits> at = own;
    at.codes += team * outputs * shape.row_bytes;
    at.scale += team * outputs * shape.scale_bytes;
#pragma unroll 1
    for (u32 tile = first_tile; tile < together; tile += teams) {
      parts_of_tile<bits>(tiles.place(i), at, params.number, x, of_turn + tile * of_tile);
      at.codes += to_next_codes;
      at.scale += to_next_scale;
    }
    __syncthreads();
    if (i + tiles_places < count) tiles.bring(i + tiles_places, i + tiles_places + 1, rows_of);
    if (turned / lanes * lanes < together * tile_rows) {  // warps take turns
      const u32 tile = min(turned / tile_rows, together - 1), output = row + tile * outputs + turned % outputs;
      float sum = sum_of_parts(of_turn + tile * of_tile, all_parts, turned % tile_rows);
      if (is_double) {
        const float up = __shfl_sync(everyone, sum, lane / tile_rows * tile_rows + lane % outputs + outputs);
        sum = both_of(params, expert, output, sum, up);
      } else if (place < all.pairs) {
        sum = biased(params, params.bias, expert, output, sum);
      }
      if (turned < together * tile_rows && turned % tile_rows < outputs && output < params.rows) out[output] = sum;
    }
    turned += lanes;
    if (turned >= blockDim.x) turned -= blockDim.x;
    row += step;
    if (row >= params.rows) row = 0, place++;
  }
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

#define TILES_KERNELS(bits)                                                                    \
  KERNEL(expert_gate_up_tiles_##bits, ExpertTilesParams, (tiles_warps * lanes, copied_blocks), \
         (expert_tiles<bits, true>))                                                           \
  KERNEL(expert_down_tiles_##bits, ExpertTilesParams, (tiles_warps * lanes, copied_blocks), (expert_tiles<bits, false>))
TILES_KERNELS(4)
TILES_KERNELS(8)
