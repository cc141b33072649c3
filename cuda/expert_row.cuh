// The experts of one row, by tiles in shared memory: the router's choice with gate and up, then down of all with the
// shared one and the sum. As the kernels that do one of these by themselves, bit for bit.
#include "choice.h"
#include "copied.h"
#include "experts.h"

// ---- Choice, gate and up --------------------------------------------------------------------------------------------

struct RoutedShared {
  DigitStage stages[copied_warps];
  float chosen[few_experts];
  int ids[few_experts];
  u64 arrivals[copied_places];
};

// Every block finds the router's choice for itself; one keeps it. Grid of blocks: blocks that go through tiles of
// eight outputs of each matrix, places of the choice. A warp for each part of the columns, and one for the choice.
// Dynamic memory as for row_products.
template <u32 bits>
DEV void routed_gate_up(const RoutedParams& all) {
  extern __shared__ uint4 room[];
  __shared__ RoutedShared shared;
  let_next_come();
  const ExpertParams& params = all.experts;
  constexpr u32 outputs = tile_rows / 2;
  const Storage stored = storage_of(params);
  const TileShape shape = tile_shape(params.columns, bits);
  const TilePlaces tiles = {reinterpret_cast<u8*>(room), shape.bytes(), shared.arrivals};
  const u32 warp = warp_of(), lane = lane_of(), place = blockIdx.y;
  const u32 of_matrix = (params.rows + outputs - 1) / outputs, all_parts = stored.parts();
  const u32 count = (of_matrix - blockIdx.x + gridDim.x - 1) / gridDim.x;
  float* sums = reinterpret_cast<float*>(tiles.place(all.places));
  if (threadIdx.x == 0) TilePlaces::prepare(shared.arrivals, all.places);
  __syncthreads();
  wait_for_previous();
  float numbers[pack];
  RowPart x[1];
  FewLogits logits;
  if (warp == all_parts) {
    logits.load(all.route.logits, all.route.experts);
    choose_of_few(logits, all.route.experts, all.route.k, shared.ids, shared.chosen);
  } else {
    pack_of_part(params.x, warp, numbers);
    make_parts<1>(numbers, shared.stages[warp], x);
  }
  __syncthreads();
  const u32 expert = u32(shared.ids[place]);
  const u8* slot = params.slots + params.slot_of[expert];
  const StoredMatrix gate = matrix_of(slot, params.matrix), raised = matrix_of(slot, params.second);
  const auto bring = [&](u32 i) {
    const u32 first = (blockIdx.x + i * gridDim.x) * outputs;
    tiles.bring(shape, i % all.places, [&](u32 r) {
      return stored_row(r < outputs ? gate : raised, shape, min(first + r % outputs, params.rows - 1));
    });
  };
#pragma unroll 1
  for (u32 i = 0; i < min(count, all.places); i++) bring(i);
  // What comes next of this expert: each lane of each of its blocks asks for a share.
  const u64 share = all.down_bytes / (gridDim.x * lanes) / 16 * 16;
  if (warp == 0 && share) prefetch_bytes(slot + all.down + (blockIdx.x * lanes + lane) * share, u32(share));
  if (warp == all_parts && blockIdx.x == 0 && place == 0)
    keep_choice(all.route, logits, shared.ids, shared.chosen, all.route.ids, all.route.weights);
#pragma unroll 1
  for (u32 base = 0, half = 0; base < count; base += all.together, half ^= 1) {
    const u32 here = min(all.together, count - base);
    float* of_half = sums + half * all.together * all_parts * tile_rows;
#pragma unroll 1
    for (u32 i = 0; i < here; i++) {
      const u32 at = (base + i) % all.places;
      tiles.await(at, (base + i) / all.places);
      if (warp >= all_parts) continue;
      const float sum = part_of_tile<bits>(tiles.place(at), shape, stored, warp, x[0]);
      if (lane % 4 < 2) of_half[(i * all_parts + warp) * tile_rows + lane / 4 + lane % 4 * 8] = sum;
    }
    __syncthreads();
#pragma unroll 1
    for (u32 i = base + all.places; i < min(base + here + all.places, count); i++) bring(i);
    if (warp * lanes < here * tile_rows) {
      const u32 i = min(threadIdx.x / tile_rows, here - 1), r = threadIdx.x % tile_rows;
      const u32 row = (blockIdx.x + (base + i) * gridDim.x) * outputs + r;
      const float total = sum_of_parts(of_half + i * all_parts * tile_rows, all_parts, r);
      const float up = __shfl_sync(everyone, total, lane / tile_rows * tile_rows + r % outputs + outputs);
      const float both = both_of(params, expert, row, total, up);
      if (threadIdx.x < here * tile_rows && r < outputs && row < params.rows)
        params.out[u64(place) * params.rows + row] = both;
    }
  }
}

// ---- Down and the sum -----------------------------------------------------------------------------------------------

constexpr u32 units_together = 2;  // of a warp

struct ExpertSumShared {
  DigitStage stages[sum_warps];
  float weights[lanes];
  float shared_weight;
  u64 arrivals[lanes + 1];
};

// A block has sixteen outputs of every expert. A unit is a part of one expert's columns. Grid of blocks: tiles of rows.
// Dynamic memory: a place for each expert and the shared one, then the parts of all units, then their sums.
template <u32 bits>
DEV void expert_sum(const ExpertSumParams& all) {
  extern __shared__ uint4 room[];
  __shared__ ExpertSumShared shared;
  let_next_come();
  const ExpertParams& params = all.experts;
  const Storage stored = storage_of(params);
  const TileShape shape = tile_shape(params.columns, bits);
  const TilePlaces tiles = {reinterpret_cast<u8*>(room), shape.bytes(), shared.arrivals};
  const u32 warp = warp_of(), lane = lane_of(), warps = blockDim.x / lanes, k = params.k;
  const u32 all_parts = stored.parts(), first = blockIdx.x * tile_rows, last = params.rows - 1;
  const bool has_shared = all.shared.codes != nullptr;
  const u32 experts = k + (has_shared ? 1 : 0), units = experts * all_parts;
  float* parts = reinterpret_cast<float*>(tiles.place(experts));
  float* totals = parts + units * tile_rows;
  const auto bring = [&](u32 i, const StoredMatrix& matrix) {
    tiles.bring(shape, i, [&](u32 r) { return stored_row(matrix, shape, min(first + r, last)); });
  };
  if (threadIdx.x == 0) TilePlaces::prepare(shared.arrivals, experts);
  __syncthreads();
  if (has_shared) bring(k, all.shared);
  float numbers[pack], weight = 0.0f, residual = 0.0f, gate = 0.0f;
  // A warp makes the digits of two units at once, a half each.
  const auto load = [&](u32 base) {
    const u32 unit = min(base + warp + lane / (lanes / 2) * warps, units - 1), expert = unit / all_parts;
    const float* x = expert < k ? params.x + u64(expert) * params.columns : all.shared_x;
    pack_of_part(x, unit - expert * all_parts, numbers);
  };
  wait_for_previous();
  const u32 id = u32(params.ids[min(lane, k - 1)]);
  load(0);
  weight = all.sum.weights[min(lane, k - 1)];
  if (all.sum.shared_gate) gate = all.sum.shared_gate[0];
  if (all.sum.residual) residual = all.sum.residual[min(first + threadIdx.x % tile_rows, last)];
  const u64 slot = params.slot_of[id];
#pragma unroll 1
  for (u32 i = 0; i < k; i++) bring(i, matrix_of(params.slots + __shfl_sync(everyone, slot, i), params.matrix));
  if (warp == 0) {
    shared.weights[lane] = weight;
    if (lane == 0) shared.shared_weight = all.sum.shared_gate ? sigmoid(gate) : 1.0f;
  }
#pragma unroll 1
  for (u32 base = 0; base < units; base += units_together * warps) {
    RowPart x[units_together];
    if (base > 0) load(base);
    make_parts<units_together>(numbers, shared.stages[warp], x);
#pragma unroll 1
    for (u32 i = 0; base == 0 && i < experts; i++) tiles.await(i, 0);
#pragma unroll 1
    for (u32 u = 0; u < units_together; u++) {
      const u32 unit = base + u * warps + warp, expert = unit / all_parts;
      if (unit >= units) break;
      RowPart own = x[0];
      if (u > 0) own = x[1];
      const float sum = part_of_tile<bits>(tiles.place(expert), shape, stored, unit - expert * all_parts, own);
      if (lane % 4 < 2) parts[unit * tile_rows + lane / 4 + lane % 4 * 8] = sum;
    }
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
    float total = all.sum.residual ? residual + routed : routed;
    if (all.sum.shared)
      total +=
          (has_shared ? totals[k * tile_rows + threadIdx.x] : all.sum.shared[min(row, last)]) * shared.shared_weight;
    if (row <= last) all.sum.out[row] = total;
  }
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__((copied_warps + 1) * lanes, copied_blocks)
    routed_gate_up_4(const RoutedParams params) {
  routed_gate_up<4>(params);
}
extern "C" __global__ void __launch_bounds__(sum_warps* lanes, copied_blocks)
    expert_sum_4(const ExpertSumParams params) {
  expert_sum<4>(params);
}
extern "C" __global__ void __launch_bounds__((copied_warps + 1) * lanes, copied_blocks)
    routed_gate_up_8(const RoutedParams params) {
  routed_gate_up<8>(params);
}
extern "C" __global__ void __launch_bounds__(sum_warps* lanes, copied_blocks)
    expert_sum_8(const ExpertSumParams params) {
  expert_sum<8>(params);
}
