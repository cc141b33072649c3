// Rows of x as digits, for products of several rows. Digits are made once for all blocks that multiply with them.
#include "products.h"

// Grid of blocks: fragments, blocks that go through blocks of columns, the products of a batch; a warp each row of a
// fragment, and a pack of columns a lane. The groups of rows that are not there are zeros. Those for many rows lie
// together, all digits of a block, so they go out in whole lines; nobody reads the few ones of rows that are not there.
extern "C" __global__ void make_digits(const DigitsParams params) {
  constexpr u32 block_steps = lanes / 4, lines = digits_of_number * 2;
  __shared__ uint4 rooms[2][block_steps][lines][fragment_rows];
  begin_kernel();
  const u32 steps = params.columns / step_columns, groups = steps / params.group_steps;
  const u32 row = warp_of(), packs = steps * 4;
  u32 first_row = blockIdx.x * fragment_rows, end = params.n;
  u64 from = first_row + row;
  if (params.blocks) {
    const ExpertBlock& block = params.blocks[blockIdx.x / params.block_fragments];
    first_row = blockIdx.x % params.block_fragments * fragment_rows, end = block.count;
    if (first_row + row < end) from = params.pairs[block.first + first_row + row] / params.k;
  }
  if (first_row >= end) return;  // nobody reads a fragment without rows
  const bool is_there = first_row + row < end;
  const float* x = params.x + blockIdx.z * params.x_batch + (is_there ? from : 0) * params.x_stride;
  const u64 fragment = u64(blockIdx.z) * gridDim.x + blockIdx.x;
  uint2* digits = reinterpret_cast<uint2*>(params.digits);
  float next[pack];
  const auto load = [&](u32 first) {
    pack_of_x(x, (first * 4 + lane_of()) * pack, is_there ? params.columns : 0, next);
  };
  load(blockIdx.y * block_steps);
  u32 turn = 0;
#pragma unroll 1
  for (u32 first = blockIdx.y * block_steps; first < steps; first += gridDim.y * block_steps, turn ^= 1) {
    float numbers[pack];
#pragma unroll
    for (u32 i = 0; i < pack; i++) numbers[i] = next[i];
    load(first + gridDim.y * block_steps);
    const u32 index = first * 4 + lane_of();
    DigitGroup group;
    const Digits made = digits_of(numbers, params.group_steps, group);
    const PackPlace at = place_of_pack(index, params.group_steps);
    if (params.in_halves) {
      // Rows of other steps are in other banks.
      uint4(&together)[block_steps][lines][fragment_rows] = rooms[turn];
      const u32 step = at.step - first;
#pragma unroll
      for (u32 d = 0; d < digits_of_number; d++) {
        reinterpret_cast<u32*>(&together[step][2 * d][row ^ step])[at.lane] = made.of[d].x;
        reinterpret_cast<u32*>(&together[step][2 * d + 1][row ^ step])[at.lane] = made.of[d].y;
      }
      __syncthreads();
      uint4* to = reinterpret_cast<uint4*>(digits + digits_at(fragment, steps, first, 0));
      for (u32 i = threadIdx.x; i < min(block_steps, steps - first) * lines * fragment_rows; i += blockDim.x) {
        const u32 of_step = i / fragment_rows / lines;
        to[i] = together[of_step][i / fragment_rows % lines][i % fragment_rows ^ of_step];
      }
    }
    if (index >= packs) continue;
    if (!params.in_halves) {
#pragma unroll
      for (u32 d = 0; d < digits_of_number && is_there; d++)
        digits[digits_at(fragment, steps, at.step, d) + row * 4 + at.lane] = made.of[d];
    }
    if (at.lane == 0 && (at.step & (params.group_steps - 1)) == 0)
      params.groups[(fragment * groups + at.step / params.group_steps) * fragment_rows + row] = group;
  }
}
