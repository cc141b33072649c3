// Rows of x as digits, for products of several rows. Digits are made once for all blocks that multiply with them.
#include "products.h"

// Grid of blocks: fragments, blocks of columns, the products of a batch; a warp each row of a fragment, and a pack of
// columns a lane. Nobody reads the digits of rows that are not there, and their groups are zeros.
extern "C" __global__ void make_digits(const DigitsParams params) {
  begin_kernel();
  const u32 steps = params.columns / step_columns, groups = steps / params.group_steps;
  const u32 row = warp_of(), packs = steps * 4;
  u64 from = blockIdx.x * fragment_rows + row;
  bool is_there = from < params.n;
  if (params.blocks) {
    const ExpertBlock& block = params.blocks[blockIdx.x / params.block_fragments];
    const u32 place = blockIdx.x % params.block_fragments * fragment_rows + row;
    is_there = place < block.count;
    from = is_there ? params.pairs[block.first + place] / params.k : 0;
  }
  const float* x = params.x + blockIdx.z * params.x_batch + (is_there ? from : 0) * params.x_stride;
  const u64 fragment = u64(blockIdx.z) * gridDim.x + blockIdx.x;
  uint2* digits = reinterpret_cast<uint2*>(params.digits);
  const u32 index = blockIdx.y * lanes + lane_of();
  float numbers[pack];
  pack_of_x(x, index * pack, is_there ? params.columns : 0, numbers);
  DigitGroup group;
  const Digits made = digits_of(numbers, params.group_steps, group);
  if (index >= packs) return;
  const PackPlace at = place_of_pack(index, params.group_steps);
#pragma unroll
  for (u32 d = 0; d < digits_of_number && is_there; d++) {
    uint2* to = digits + digits_at(fragment, steps, at.step, d);
    if (params.in_halves) {
      u32* word = reinterpret_cast<u32*>(to) + row * 4 + at.lane;
      word[0] = made.of[d].x, word[lanes] = made.of[d].y;
    } else {
      to[row * 4 + at.lane] = made.of[d];
    }
  }
  if (at.lane == 0 && at.step % params.group_steps == 0)
    params.groups[(fragment * groups + at.step / params.group_steps) * fragment_rows + row] = group;
}
