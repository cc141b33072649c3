// The experts that a router chose. However many there are, they take one launch for gate, up and SwiGLU, and one for
// down; where a block has several pairs, the digits of x are made before each.
//
// When a router on the device chose them for one token, a block has one pair (token * k + place). Otherwise there is a
// list of blocks of pairs of one expert, by the host or by group_experts, which leaves blocks without pairs behind the
// last. The output of a pair goes to its own row, so the order of the blocks changes no bit.
#pragma once
#include "few.h"
#include "many.h"
#include "plain.h"

DEV Storage storage_of(const ExpertParams& params) { return {params.columns, params.group_steps, params.number}; }

struct Pairs {
  const u8* slot;
  u32 first;
  u32 count;
  u32 expert;
};
DEV Pairs pairs_of(const ExpertParams& params) {
  if (params.ids) {
    const u32 expert = u32(params.ids[blockIdx.y]);
    return {params.slots + params.slot_of[expert], blockIdx.y, 1, expert};
  }
  const ExpertBlock& block = params.blocks[blockIdx.y];
  return {block.slot, block.first, block.count, block.expert};
}
DEV u32 pair_at(const ExpertParams& params, u32 place) { return params.ids ? place : params.pairs[place]; }
DEV StoredMatrix matrix_of(const u8* slot, const ExpertMatrix& matrix) {
  return {slot + matrix.codes, slot + matrix.scales, slot + matrix.biases};
}

// An output of an expert's matrix, with its bias if there is one.
DEV float biased(const ExpertParams& params, const float* bias, u32 expert, u32 row, float x) {
  return bias && row < params.rows ? x + bias[u64(expert) * params.rows + row] : x;
}
// What becomes of gate and up.
DEV float both_of(const ExpertParams& params, u32 expert, u32 row, float gate, float up) {
  return gated(biased(params, params.bias, expert, row, gate), biased(params, params.second_bias, expert, row, up),
               params.alpha, params.limit, params.is_geglu);
}

// The rows of a tile. For gate and up, eight of each lie side by side.
template <u32 bits, bool is_double>
DEV TwoRows<bits> rows_of_tile(const ExpertParams& params, const u8* slot, u32 tile) {
  const u32 g = lane_of() / 4, first = tile * (is_double ? tile_rows / 2 : tile_rows);
  const Storage stored = storage_of(params);
  TwoRows<bits> rows;
  rows.set(0, stored, matrix_of(slot, params.matrix), min(first + g, params.rows - 1));
  rows.set(1, stored, matrix_of(slot, is_double ? params.second : params.matrix),
           min(first + (is_double ? g : g + 8), params.rows - 1));
  return rows;
}

// out[p] = silu(gate . x[p / k]) * (up . x[p / k]), or W . x[p / k], or what biases, clamped_swiglu and geglu make.
// Grid of blocks: blocks that go through tiles of rows, blocks of one pair.
template <u32 bits, u32 steps, bool is_double>
DEV void expert_one(const ExpertParams& params) {
  __shared__ OneRow shared;
  begin_kernel();
  constexpr u32 outputs = is_double ? tile_rows / 2 : tile_rows;
  const Pairs block = pairs_of(params);
  if (block.count == 0) return;
  const u32 pair = pair_at(params, block.first), tiles = (params.rows + outputs - 1) / outputs;
  const u32 count = (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;
  const auto tile = [&](u32 i) { return blockIdx.x + i * gridDim.x; };
  const auto rows_of = [&](u32 i) { return rows_of_tile<bits, is_double>(params, block.slot, tile(i)); };
  const auto out = [&](u32 i, u32 row, float total) {
    const u32 first = tile(i) * outputs;
    if (is_double) {
      const float up = __shfl_sync(everyone, total, row % 8 + 8);
      total = both_of(params, block.expert, first + row, total, up);
    } else {
      total = biased(params, params.bias, block.expert, first + row, total);
    }
    if (row < outputs && first + row < params.rows) params.out[u64(pair) * params.rows + first + row] = total;
  };
  const auto x = [&] { return RowOfX{params.x + u64(pair / params.k) * params.columns, nullptr, 1.0f, nullptr}; };
  outputs_of_one<bits, steps>(storage_of(params), count, shared, rows_of, x, out);
}

// For formats that are known: a warp a tile. Grid of blocks: few_warps tiles of rows, blocks of pairs.
template <u32 bits, u32 steps, bool is_double>
DEV void expert_few_known(const ExpertParams& params) {
  extern __shared__ uint4 space[];
  begin_kernel();
  constexpr u32 outputs = is_double ? tile_rows / 2 : tile_rows;
  const Pairs block = pairs_of(params);
  if (block.count == 0) return;
  const Storage stored = storage_of(params);
  const FewRows x = few_rows_in(space, stored, block.count);
  const u32 g = lane_of() / 4, t = lane_of() % 4, tile = blockIdx.x * few_warps + warp_of();
  float totals[few_pairs];
  outputs_of_few<bits, steps, (is_double && bits < 8 ? 4 : 2)>(rows_of_tile<bits, is_double>(params, block.slot, tile),
                                                               stored, params.digits, params.groups, blockIdx.y, x,
                                                               totals);
  const u32 row = tile * outputs + g + (is_double ? 0 : t % 2 * 8);
#pragma unroll
  for (u32 p = 0; p < few_pairs; p++) {
    const u32 place = 2 * p + t / 2;
    const float up = is_double ? __shfl_xor_sync(everyone, totals[p], 1) : 0.0f;
    if (place >= block.count || row >= params.rows || (is_double && t % 2)) continue;
    params.out[u64(pair_at(params, block.first + place)) * params.rows + row] =
        is_double ? both_of(params, block.expert, row, totals[p], up)
                  : biased(params, params.bias, block.expert, row, totals[p]);
  }
}

// For the others. Grid of blocks: tiles of rows, blocks of pairs.
template <u32 bits, u32 steps, bool is_double>
DEV void expert_few(const ExpertParams& params) {
  __shared__ SomeRows shared;
  begin_kernel();
  constexpr u32 outputs = is_double ? tile_rows / 2 : tile_rows;
  const Pairs block = pairs_of(params);
  if (block.count == 0) return;
  __shared__ float outputs_of_tile[tile_rows][few_rows];
  const auto out = [&](u32, u32 row, u32 place, float sum) { outputs_of_tile[row][place] = sum; };
  outputs_of_some<bits, steps>(
      storage_of(params), 1, [&](u32) { return rows_of_tile<bits, is_double>(params, block.slot, blockIdx.x); },
      params.digits, params.groups, blockIdx.y, block.count, shared, [] {}, out);
  __syncthreads();
  for (u32 i = threadIdx.x; i < block.count * outputs; i += blockDim.x) {
    const u32 at = i % outputs, r = i / outputs, row = blockIdx.x * outputs + at;
    if (row >= params.rows) continue;
    const float total = outputs_of_tile[at][r];
    params.out[u64(pair_at(params, block.first + r)) * params.rows + row] =
        is_double ? both_of(params, block.expert, row, total, outputs_of_tile[at + tile_rows / 2][r])
                  : biased(params, params.bias, block.expert, row, total);
  }
}

// A warp a tile. Grid of blocks: as many tiles of rows as a block has warps, blocks of pairs.
template <u32 bits, u32 steps, bool is_double, u32 fragments>
DEV void expert_many(const ExpertParams& params) {
  extern __shared__ uint4 space[];
  begin_kernel();
  constexpr u32 outputs = is_double ? tile_rows / 2 : tile_rows;
  const Pairs block = pairs_of(params);
  if (block.count == 0) return;
  const u32 g = lane_of() / 4, t = lane_of() % 4, tile = blockIdx.x * many_warps + warp_of(), row = tile * outputs + g;
  const ManyRows x = {params.digits, params.groups, u64(blockIdx.y) * fragments, fragments_of(block.count)};
  ManySums<fragments> totals;
  outputs_of_many<bits, steps, fragments, fragments == most_fragments>(
      storage_of(params), x, space, rows_of_tile<bits, is_double>(params, block.slot, tile), [] {}, totals);
#pragma unroll
  for (u32 f = 0; f < fragments; f++)
#pragma unroll
    for (u32 j = 0; j < 2; j++) {
      const u32 place = f * fragment_rows + 2 * t + j;
      if (place >= block.count) continue;
      float* out = params.out + u64(pair_at(params, block.first + place)) * params.rows;
      const float first = totals.of[f][j], second = totals.of[f][2 + j];
      if (is_double) {
        if (row < params.rows) out[row] = both_of(params, block.expert, row, first, second);
      } else {
        if (row < params.rows) out[row] = biased(params, params.bias, block.expert, row, first);
        if (row + 8 < params.rows) out[row + 8] = biased(params, params.bias, block.expert, row + 8, second);
      }
    }
}

// Of plain elements, or of codes that become f32. Grid of blocks: blocks of outputs, blocks of pairs.
template <u32 codes, u32 outputs, u32 some, bool is_double>
DEV void expert_plain(const ExpertParams& params) {
  begin_kernel();
  const u32 first = (blockIdx.x * plain_warps + warp_of()) * outputs;
  if (first >= params.rows) return;
  const Pairs block = pairs_of(params);
  if (block.count == 0) return;
  const float* x[some];
#pragma unroll
  for (u32 r = 0; r < some; r++)
    x[r] = params.x + u64(pair_at(params, block.first + min(r, block.count - 1)) / params.k) * params.columns;
  float result[some][outputs], raised[some][outputs];
  add_plain<codes>(matrix_of(block.slot, params.matrix), storage_of(params), first, params.rows - 1, x, result);
  if (is_double)
    add_plain<codes>(matrix_of(block.slot, params.second), storage_of(params), first, params.rows - 1, x, raised);
  if (lane_of() > 0) return;
#pragma unroll
  for (u32 r = 0; r < some; r++)
#pragma unroll
    for (u32 o = 0; o < outputs; o++)
      if (r < block.count && first + o < params.rows)
        params.out[u64(pair_at(params, block.first + r)) * params.rows + first + o] =
            is_double ? both_of(params, block.expert, first + o, result[r][o], raised[r][o])
                      : biased(params, params.bias, block.expert, first + o, result[r][o]);
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

constexpr u32 product_threads = product_warps * lanes;

#define EXPERT_KERNEL(name, bounds, function) KERNEL(name, ExpertParams, bounds, function)
