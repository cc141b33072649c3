// Experts that few rows of x chose: gate and up, or down, of one or two rows at a time, by tiles in shared memory. As
// the kernels that have one pair each, bit for bit.
#include "sorted_pairs.h"
#include "tiles_params.h"

union TilesWork {
  PairCounts counts;
  DigitStage stages[tiles_warps];  // after the pairs are sorted
};
struct TilesShared {
  TilesWork work;
  SortedPairs sorted;
  u64 arrivals[copied_places];
};

// Some tiles of one entry, `here` of them, and what is left of the block's share, with these.
struct TilesAt {
  u32 entry, tile, here, left;

  DEV void see(u32 together, u32 of_entry) { here = min(min(together, of_entry - tile), left); }
  DEV void go_on(u32 together, u32 of_entry) {
    left -= here, tile += here;
    if (tile == of_entry) tile = 0, entry++;
    see(together, of_entry);
  }
};

// The tiles of all entries lie one after the other, and a block has its share of these, `together` at a time. So it has
// few entries, and makes the digits of their rows once: a warp those of two parts of the columns, which it has in every
// tile. Where there are fewer parts than a block's warps have, a team of warps has a tile. Behind the chosen experts
// comes the shared one, with two rows at a time. Grid of blocks: as many as run at the same time. Dynamic memory: the
// places for tiles, and twice the parts of as many as are together.
template <u32 bits, bool is_double>
DEV void expert_tiles(const ExpertTilesParams& all) {
  extern __shared__ uint4 room[];
  __shared__ TilesShared shared;
  const ExpertParams& params = all.experts;
  const SortedPairs& sorted = shared.sorted;
  constexpr u32 outputs = is_double ? tile_rows / 2 : tile_rows;
  const u32 warp = warp_of(), lane = lane_of(), warps = blockDim.x / lanes, together = all.together;
  const TileShape shape = tile_shape(params.columns, bits, together);
  const TilePlaces tiles = tile_places(room, shape.bytes(), all.places, shared.arrivals);
  const u32 all_parts = params.columns / part_columns, of_team = (all_parts + copied_parts - 1) / copied_parts;
  const u32 of_tile = made_once(all_parts * two_rows * tile_rows), of_entry = (params.rows + outputs - 1) / outputs;
  float* sums = reinterpret_cast<float*>(tiles.end());
  prepare_sort(params, all.expert_count, shared.work.counts);
  if (threadIdx.x == 0) tiles.prepare();
  // Down comes when gate and up have waited, and so has the choice.
  const bool waits_later = !is_double && all.is_behind_gate_up;
  if (!waits_later) wait_for_previous();
  let_next_come();
  __syncthreads();
  const u32 entries = sort_pairs(params, all.pairs, shared.work.counts, shared.sorted);
  const u32 total = (entries + (is_double ? 0 : (all.shared_rows + two_rows - 1) / two_rows)) * of_entry;
  const u32 begin = total * blockIdx.x / gridDim.x;
  TilesAt at = {begin / of_entry, begin % of_entry, 0, total * (blockIdx.x + 1) / gridDim.x - begin};
  at.see(together, of_entry);
  TilesAt asked = at, before = at;
  const auto rows_of = [&](u32) {
    const u32 row = asked.tile * outputs, end = min(params.rows, row + asked.here * outputs);
    if (!is_double && asked.entry >= entries) return TileRows{shape, all.shared, {}, row, end};
    const u8* slot = sorted.entries[asked.entry].slot;
    const StoredMatrix second = is_double ? matrix_of(slot, params.second) : StoredMatrix{};
    return TileRows{shape, matrix_of(slot, params.matrix), second, row, end};
  };
  const u32 team = warp / of_team, first_part = (warp - team * of_team) * copied_parts;
  const u32 teams = warps / of_team, first_tile = team < teams ? team : together;  // a warp may have no team
  const LaneOfTwo<bits> own(shape, first_part, all_parts, is_double ? together * outputs : tile_rows / 2);
  TwoRowsPart x[copied_parts] = {};
  u32 expert = 0, count = 0, pair = 0, brought = 0;  // pair: of the lane's row
  u32 turn = warp;                                   // warps take turns when sums are wanted
  float* out = params.out;
#pragma unroll 1
  for (u32 i = 0;; i++) {
#pragma unroll 1
    for (; brought < i + all.places && asked.left; brought++) {
      tiles.bring(brought, brought + 1, rows_of, (warp + brought) % warps, warps);
      asked.go_on(together, of_entry);
    }
    if (i == 0 && waits_later) wait_for_previous();
    if (i > 0) {
#pragma unroll 1
      for (u32 tile = turn; tile < before.here; tile += warps) {
        const u32 output = (before.tile + tile) * outputs + lane % outputs;
        float sum = sum_of_two(sums + ((i - 1) % 2 * together + tile) * of_tile, all_parts);
        if (is_double) {
          const float up = __shfl_sync(everyone, sum, lane / tile_rows * tile_rows + lane % outputs + outputs);
          sum = both_of(params, expert, output, sum, up);
        } else if (before.entry < entries) {
          sum = biased(params, params.bias, expert, output, sum);
        }
        if (lane / tile_rows < count && lane % tile_rows < outputs && output < params.rows)
          out[u64(pair) * params.rows + output] = sum;
      }
      turn = (turn + before.here) % warps;
    }
    if (at.left == 0) break;
    if (i == 0 || at.tile == 0) {  // the next entry
      const float* from = params.x;
      u32 rows[two_rows], of_row = params.k;
      if (is_double || at.entry < entries) {
        expert = sorted.entries[at.entry].expert, count = sorted.entries[at.entry].count;
        rows[0] = sorted.pairs[at.entry][0], rows[1] = sorted.pairs[at.entry][count - 1];
      } else {
        rows[0] = (at.entry - entries) * two_rows;
        count = min(two_rows, all.shared_rows - rows[0]);
        rows[1] = rows[0] + count - 1;
        from = all.shared_x, out = all.shared_out, of_row = 1;
      }
      pair = rows[lane / tile_rows];
      float numbers[two_rows][pack];
#pragma unroll
      for (u32 r = 0; r < two_rows; r++)
        pack_of_part(from + u64(rows[r] / of_row) * params.columns, min(first_part + lane / (lanes / 2), all_parts - 1),
                     numbers[r]);
#pragma unroll 1
      for (u32 r = 0; r < count; r++) {
        if (r > 0) {
#pragma unroll
          for (u32 j = 0; j < pack; j++) numbers[0][j] = numbers[1][j];
        }
        make_row_of_two(numbers[0], shared.work.stages[warp], r, x);
      }
    }
    tiles.settle();
    tiles.await(i);
#pragma unroll 1
    for (u32 tile = first_tile; tile < at.here; tile += teams) {
      const u32 first = tile * outputs;  // of its rows in the place
      const u8* place = tiles.place(i);
      parts_of_two<bits>(place + first * shape.row_bytes, place + shape.scales() + first * shape.scale_bytes, own,
                         params.number, x, sums + (i % 2 * together + tile) * of_tile);
    }
    __syncthreads();
    before = at;
    at.go_on(together, of_entry);
  }
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

#define TILES_KERNELS(bits)                                                                    \
  KERNEL(expert_gate_up_tiles_##bits, ExpertTilesParams, (tiles_warps * lanes, copied_blocks), \
         (expert_tiles<bits, true>))                                                           \
  KERNEL(expert_down_tiles_##bits, ExpertTilesParams, (tiles_warps * lanes, copied_blocks), (expert_tiles<bits, false>))
TILES_KERNELS(4)
TILES_KERNELS(8)
