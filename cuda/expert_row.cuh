// The experts of one row: the router's choice with gate and up, by tiles in shared memory, then down of all with the
// shared one and the sum. As the kernels that do one of these by themselves, bit for bit.
#include "choice.h"
#include "copied.h"
#include "experts.h"

// ---- Choice, gate and up --------------------------------------------------------------------------------------------

struct RoutedShared {
  DigitStage stages[copied_warps];
  float chosen[few_experts];
  int ids[few_experts];
  u64 slots[few_experts];
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
  // The table of slots is there before the batch begins.
  for (u32 i = threadIdx.x; i < all.route.experts; i += blockDim.x) shared.slots[i] = params.slot_of[i];
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
  const u8* slot = params.slots + shared.slots[expert];
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

struct ExpertSumShared {
  DigitStage stages[sum_warps];
  u64 slots[few_experts];
  float weights[lanes];
  float residual[tile_rows];
  float shared_weight;
};

// A block has sixteen outputs of every expert. A unit is a part of one expert's columns, and a warp has two at once (of
// 8 bits one), whose weights are in registers: rows are too short for copies to pay. Grid of blocks: tiles of rows.
// Dynamic memory: the parts of all units, then their sums.
template <u32 bits>
DEV void expert_sum(const ExpertSumParams& all) {
  extern __shared__ uint4 room[];
  __shared__ ExpertSumShared shared;
  let_next_come();
  const ExpertParams& params = all.experts;
  const Storage stored = storage_of(params);
  const u32 warp = warp_of(), lane = lane_of(), warps = blockDim.x / lanes, k = params.k;
  const u32 all_parts = stored.parts(), first = blockIdx.x * tile_rows, last = params.rows - 1;
  const bool has_shared = all.shared.codes != nullptr;
  const u32 experts = k + (has_shared ? 1 : 0), units = experts * all_parts;
  float* parts = reinterpret_cast<float*>(room);
  float* totals = parts + units * tile_rows;
  // The table of slots is there before the batch begins.
  for (u32 i = threadIdx.x; i < all.slot_count; i += blockDim.x) shared.slots[i] = params.slot_of[i];
  __syncthreads();
  constexpr u32 together = bits == 8 ? 1 : 2;
  PartOfRows<bits, copied_steps> weights[together];
  float numbers[pack];
  // One that is not there is taken to be the last. A warp makes the digits of two units at once, a half each.
  const auto unit_at = [&](u32 base, u32 u) { return min(base + u * warps + warp, units - 1); };
  const auto bring = [&](u32 u, u32 unit) {
    const u32 expert = unit / all_parts, g = lane / 4;
    const StoredMatrix matrix =
        expert < k ? matrix_of(params.slots + shared.slots[u32(params.ids[expert])], params.matrix) : all.shared;
    TwoRows<bits> rows;
    rows.set(0, stored, matrix, min(first + g, last));
    rows.set(1, stored, matrix, min(first + g + 8, last));
    if (lane & 1) rows.scales[0] = rows.scales[1], rows.biases[0] = rows.biases[1];
    weights[u].load(rows, stored, (unit - expert * all_parts) * part_steps, part_steps, true, false);
  };
  const auto load = [&](u32 base) {
    const u32 unit = unit_at(base, lane / (lanes / 2) % together), expert = unit / all_parts;
    const float* x = expert < k ? params.x + u64(expert) * params.columns : all.shared_x;
    pack_of_part(x, unit - expert * all_parts, numbers);
  };
  if (has_shared && warp == 0) {  // nobody writes these weights
    const u32 row_bytes = params.columns / pack * bits, row = min(first + lane % tile_rows, last);
    for (u32 at = lane / tile_rows * 128; at < row_bytes; at += 256)
      prefetch_line(all.shared.codes + u64(row) * row_bytes + at);
    prefetch_line((lane < tile_rows ? all.shared.scales : all.shared.biases) + u64(row) * all_parts * 4);
  }
  wait_for_previous();
#pragma unroll
  for (u32 u = 0; u < together; u++) bring(u, unit_at(0, u));
  load(0);
  if (warp == 0) {
    shared.weights[lane] = all.sum.weights[min(lane, k - 1)];
    if (lane < tile_rows && all.sum.residual) shared.residual[lane] = all.sum.residual[min(first + lane, last)];
    if (lane == 0) shared.shared_weight = all.sum.shared_gate ? sigmoid(all.sum.shared_gate[0]) : 1.0f;
  }
#pragma unroll 1
  for (u32 base = 0; base < units; base += together * warps) {
    if (base > 0) {
      load(base);
#pragma unroll
      for (u32 u = 0; u < together; u++) bring(u, unit_at(base, u));
    }
    const DigitGroup group = stage_digits(numbers, shared.stages[warp]);
#pragma unroll
    for (u32 u = 0; u < together; u++) {
      const u32 unit = base + u * warps + warp;
      if (unit >= units) break;
      const float sum = part_of_x<bits>(weights[u], stored, staged_part(shared.stages[warp], group, u));
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
    float total = all.sum.residual ? shared.residual[threadIdx.x] + routed : routed;
    if (all.sum.shared)
      total +=
          (has_shared ? totals[k * tile_rows + threadIdx.x] : all.sum.shared[min(row, last)]) * shared.shared_weight;
    if (row <= last) all.sum.out[row] = total;
  }
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

#define EXPERT_KERNELS(bits)                                                                                       \
  KERNEL(routed_gate_up_##bits, RoutedParams, ((copied_warps + 1) * lanes, copied_blocks), (routed_gate_up<bits>)) \
  KERNEL(expert_sum_##bits, ExpertSumParams, (sum_warps * lanes, copied_blocks), (expert_sum<bits>))
EXPERT_KERNELS(4)
EXPERT_KERNELS(8)
