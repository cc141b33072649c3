// The experts of one row: the router's choice with gate and up, by tiles in shared memory, then down of all with the
// shared one and the sum. As the kernels that do one of these by themselves, bit for bit.
#include "choice.h"
#include "copied.h"
#include "experts.h"

// ---- Choice, gate and up --------------------------------------------------------------------------------------------

struct RoutedShared {
  DigitStage stages[copied_warps];
  float chosen[lanes];
  int ids[lanes];
  u64 slots[few_experts];
  u64 arrivals[copied_places];
};

// Every block finds the router's choice for itself, as far as its own place; one finds all of it and keeps it. Grid of
// blocks: blocks that go through tiles of eight outputs of each matrix, places of the choice. A warp for two parts of
// the columns, whose digits it makes while one besides chooses and asks for the first tiles. Dynamic memory as for
// row_products.
template <u32 bits>
DEV void routed_gate_up(const RoutedParams& all) {
  extern __shared__ uint4 room[];
  __shared__ RoutedShared shared;
  let_next_come();
  const ExpertParams& params = all.experts;
  constexpr u32 outputs = tile_rows / 2;
  const TileShape shape = tile_shape(params.columns, bits);
  const TilePlaces tiles = tile_places(room, shape.bytes(), all.places, shared.arrivals);
  const u32 warp = warp_of(), lane = lane_of(), place = blockIdx.y, last_warp = blockDim.x / lanes - 1;
  const u32 of_matrix = (params.rows + outputs - 1) / outputs, all_parts = params.columns / part_columns;
  const u32 count = (of_matrix - blockIdx.x + gridDim.x - 1) / gridDim.x;
  const u32 of_tile = made_once(all_parts * tile_rows);  // sums
  float* sums = reinterpret_cast<float*>(tiles.end());
  // The table of slots is there before the batch begins.
  for (u32 i = threadIdx.x; i < all.route.experts; i += blockDim.x) shared.slots[i] = params.slot_of[i];
  if (threadIdx.x == 0) tiles.prepare();
  __syncthreads();
  wait_for_previous();
  float numbers[pack];
  RowPart x[copied_parts];
  const LaneOfTile<bits> own(shape, warp * copied_parts, all_parts);
  const auto slot_of_choice = [&] { return params.slots + shared.slots[u32(shared.ids[place])]; };
  const auto rows_of = [&](u32 i) {
    const u8* slot = slot_of_choice();
    return TileRows{shape, matrix_of(slot, params.matrix), matrix_of(slot, params.second),
                    (blockIdx.x + i * gridDim.x) * outputs, params.rows};
  };
  const bool keeps_choice = blockIdx.x == 0 && place == 0;
  const u32 first_asked = tiles.one_asks ? min(all.places, count) : 0;
  if (warp < last_warp) {
    pack_of_part(params.x, min(warp * copied_parts + lane / (lanes / 2), all_parts - 1), numbers);
    make_parts(numbers, shared.stages[warp], x);
  } else {
    FewLogits logits;
    logits.load(all.route.logits, all.route.experts);
    const u32 places = keeps_choice ? all.route.k : place + 1;
    choose_of_few(logits, all.route.experts, places, shared.ids, shared.chosen);
    tiles.bring(0, first_asked, rows_of, 0, 1);
  }
  __syncthreads();
  const u32 expert = u32(shared.ids[place]);
  const u8* slot = slot_of_choice();
#pragma unroll 1
  for (u32 base = 0, half = 0, asked = first_asked; base < count; base += all.together, half ^= 1) {
    const u32 here = min(all.together, count - base), end = min(base + all.places, count);
    float* of_half = sums + half * all.together * of_tile;
    tiles.bring(asked, end, rows_of);
    asked = end;
    if (base == 0 && warp == last_warp && keeps_choice) {
      FewLogits logits;
      logits.load(all.route.logits, all.route.experts);
      keep_choice(all.route, logits, shared.ids, shared.chosen, all.route.ids, all.route.weights);
    }
    tiles.settle();
#pragma unroll 1
    for (u32 i = 0; i < here; i++) {
      tiles.await(base + i);
      if (warp < last_warp) parts_of_tile<bits>(tiles.place(base + i), own, params.number, x, of_half + i * of_tile);
    }
    if (base == 0 && warp == last_warp) {  // what comes next of this expert
      constexpr u32 askers = 4;
      const u64 share = all.down_bytes / (gridDim.x * askers) / 16 * 16;
      if (lane < askers && share) prefetch_bytes(slot + all.down + (blockIdx.x * askers + lane) * share, u32(share));
    }
    __syncthreads();
    if (warp * lanes < here * tile_rows) {
      const u32 i = min(threadIdx.x / tile_rows, here - 1), r = threadIdx.x % tile_rows;
      const u32 row = (blockIdx.x + (base + i) * gridDim.x) * outputs + r;
      const float total = sum_of_parts(of_half + i * of_tile, all_parts, r);
      const float up = __shfl_sync(everyone, total, lane / tile_rows * tile_rows + r % outputs + outputs);
      const float both = both_of(params, expert, row, total, up);
      if (threadIdx.x < here * tile_rows && r < outputs && row < params.rows)
        params.out[u64(place) * params.rows + row] = both;
    }
  }
}

// ---- Down and the sum -----------------------------------------------------------------------------------------------

struct ExpertSumShared {
  DigitStage stages[sum_warps];
  u64 slots[few_experts];
  u64 arrivals[lanes + 1];
  float weights[lanes];
  float residual[tile_rows];
  float shared_weight;
};

// A block has sixteen outputs of every expert. A unit is two parts of one expert's columns, and a warp has one at a
// time. Grid of blocks: tiles of rows. Dynamic memory: a tile of each expert, the parts of all, then their sums.
template <u32 bits>
DEV void expert_sum(const ExpertSumParams& all) {
  extern __shared__ uint4 room[];
  __shared__ ExpertSumShared shared;
  let_next_come();
  const ExpertParams& params = all.experts;
  const TileShape shape = tile_shape(params.columns, bits);
  const u32 warp = warp_of(), lane = lane_of(), warps = blockDim.x / lanes, k = params.k;
  const u32 all_parts = params.columns / part_columns, of_expert = (all_parts + copied_parts - 1) / copied_parts;
  const u32 first = blockIdx.x * tile_rows, last = params.rows - 1;
  const bool has_shared = all.shared.codes != nullptr;
  const u32 experts = k + (has_shared ? 1 : 0), units = experts * of_expert;
  const TilePlaces tiles = {reinterpret_cast<u8*>(room), shape.bytes(), experts, ~0u, shared.arrivals};
  float* parts = reinterpret_cast<float*>(tiles.end());
  float* totals = parts + experts * all_parts * tile_rows;
  // The table of slots is there before the batch begins.
  for (u32 i = threadIdx.x; i < all.slot_count; i += blockDim.x) shared.slots[i] = params.slot_of[i];
  if (threadIdx.x == 0) tiles.prepare();
  __syncthreads();
#pragma unroll 1
  for (u32 i = 0; i < 2; i++) {  // first the shared one, whose weights nobody writes
    if (i == 1) wait_for_previous();
    tiles.bring(i == 0 ? k : 0, i == 0 ? experts : k, [&](u32 expert) {
      if (expert == k) return TileRows{shape, all.shared, {}, first, params.rows};
      const u8* slot = params.slots + shared.slots[u32(params.ids[expert])];
      return TileRows{shape, matrix_of(slot, params.matrix), {}, first, params.rows};
    });
  }
  tiles.settle();
  if (warp == warps - 1) {
    shared.weights[lane] = all.sum.weights[min(lane, k - 1)];
    if (lane < tile_rows && all.sum.residual) shared.residual[lane] = all.sum.residual[min(first + lane, last)];
    if (lane == 0) shared.shared_weight = all.sum.shared_gate ? sigmoid(all.sum.shared_gate[0]) : 1.0f;
  }
#pragma unroll 1
  for (u32 unit = warp; unit < units; unit += warps) {
    const u32 expert = unit / of_expert, first_part = (unit - expert * of_expert) * copied_parts;
    float numbers[pack];
    RowPart x[copied_parts];
    pack_of_part(expert < k ? params.x + u64(expert) * params.columns : all.shared_x,
                 min(first_part + lane / (lanes / 2), all_parts - 1), numbers);
    make_parts(numbers, shared.stages[warp], x);
    tiles.await(expert);
    parts_of_tile<bits>(tiles.place(expert), {shape, first_part, all_parts}, params.number, x,
                        parts + expert * all_parts * tile_rows);
  }
  __syncthreads();
#pragma unroll 1
  for (u32 i = threadIdx.x; i < experts * tile_rows; i += blockDim.x) {
    const u32 expert = i / tile_rows, row = first + i % tile_rows;
    float total = sum_of_parts(parts + expert * all_parts * tile_rows, all_parts, i % tile_rows);
    if (params.bias && expert < k) total = biased(params, params.bias, u32(params.ids[expert]), row, total);
    totals[i] = total;
    if (row > last) continue;
    if (expert < k)
      params.out[u64(expert) * params.rows + row] = total;
    else
      all.shared_out[row] = total;
  }
  __syncthreads();
  const u32 row = first + threadIdx.x;
  if (threadIdx.x < tile_rows) {
    float routed = 0.0f;
#pragma unroll 1
    for (u32 j = 0; j < k; j++) routed = fmaf(shared.weights[j], totals[j * tile_rows + threadIdx.x], routed);
    float total = all.sum.residual ? shared.residual[threadIdx.x] + routed : routed;
    if (all.sum.shared)
      total +=
          (has_shared ? totals[k * tile_rows + threadIdx.x] : all.sum.shared[min(row, last)]) * shared.shared_weight;
    if (row <= last) all.sum.out[row] = total;
  }
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

#define EXPERT_KERNELS(bits)                                                                        \
  KERNEL(routed_gate_up_##bits, RoutedParams, ((copied_warps + 1) * lanes), (routed_gate_up<bits>)) \
  KERNEL(expert_sum_##bits, ExpertSumParams, (sum_warps * lanes, copied_blocks), (expert_sum<bits>))
EXPERT_KERNELS(4)
EXPERT_KERNELS(8)
