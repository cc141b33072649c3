// A few rows of x, for experts that few rows chose: each warp has a tile of the matrix of its own, and takes it through
// all columns. The digits of x are in shared memory. So a block waits for its warps only when it brings digits, and the
// codes of the next parts are always on their way.
#pragma once
#include "products.h"

constexpr u32 few_threads = few_warps * lanes;
constexpr u32 few_blocks = 2;            // of a multiprocessor, where rows are long; they need registers
constexpr u32 few_short_blocks = 4;      // where rows are short; they need company
constexpr u32 few_pairs = few_rows / 2;  // rows of x come in pairs

// What the rows of x that are there need: digits as [step][row][digit][lane of four], groups as [group][row].
struct FewRows {
  uint2* digits;
  DigitGroup* groups;
  u32 present;
};
// In shared memory the groups are behind the digits.
DEV FewRows few_rows_in(void* shared, const Storage& stored, u32 present) {
  auto* groups = static_cast<u8*>(shared) + min(stored.steps(), few_slab_steps) * few_step_bytes;
  return {static_cast<uint2*>(shared), reinterpret_cast<DigitGroup*>(groups), present};
}

// Steps first ... first + count - 1 of a fragment to shared memory. All threads.
DEV void bring_few(const Storage& stored, const u8* digits, const DigitGroup* groups, u64 block, u32 first, u32 count,
                   const FewRows& to) {
  constexpr u32 chunks = digits_of_number * 2;  // of a row, in a step
  const u32 of_group = stored.group_steps, all = count * to.present * chunks;
  const u8* from = digits + digits_at(block, stored.steps(), first, 0) * sizeof(uint2);
  for (u32 i = threadIdx.x; i < all; i += blockDim.x) {
    const u32 chunk = i % chunks, row = i / chunks % to.present, step = i / chunks / to.present;
    const u32 at = ((step * digits_of_number + chunk / 2) * lanes + row * 4) * u32(sizeof(uint2)) + chunk % 2 * 16;
    copy_16(reinterpret_cast<u8*>(to.digits) + i * 16, from + at);
  }
  end_of_copies();
  const DigitGroup* from_groups = groups + (block * stored.groups() + first / of_group) * fragment_rows;
  for (u32 i = threadIdx.x; i < count / of_group * to.present; i += blockDim.x)
    to.groups[i] = from_groups[i / to.present * fragment_rows + i % to.present];
  wait_for_copies<0>();
}

// Adds a part. Column g of the tensor core's product is digit g % 4 of row g / 4 of a pair of x. So of lanes 4 g ... 4
// g
// + 3 the first two have the pair's first row of x, the others its second; the even ones have row g of the matrix, the
// odd ones row g + 8.
template <u32 bits, u32 steps>
DEV void add_few(const PartOfRows<bits, steps>& rows, const Storage& stored, const FewRows& x, u32 from, u32 count,
                 int zero, float (&totals)[few_pairs]) {
  const u32 g = lane_of() / 4, t = lane_of() % 4;
  const bool is_second = t & 1;
  const int zeros[4] = {zero, zero, zero, zero};
  float sums[few_pairs] = {};
#pragma unroll
  for (u32 group = 0; group < part_steps / steps; group++) {
    if (group * steps >= count) break;
    uint2 first[steps], second[steps];
#pragma unroll
    for (u32 j = 0; j < steps; j++) {
      first[j] = rows.codes[0][group * steps + j].bytes();
      second[j] = rows.codes[1][group * steps + j].bytes();
    }
    const Scaling by = rows.scaling(0, group, stored.number);
#pragma unroll
    for (u32 p = 0; p < few_pairs; p++) {
      if (2 * p >= x.present) break;
      const u32 row = 2 * p + g / 4;
      const bool is_there = row < x.present && g % 4 < digits_of_number;
      int c[4];
#pragma unroll
      for (u32 j = 0; j < steps; j++) {
        const u32 step = from + group * steps + j;
        const uint2 digit =
            is_there ? x.digits[((step * x.present + row) * digits_of_number + g % 4) * 4 + t] : make_uint2(0, 0);
        if (j == 0)
          multiply_bytes(c, first[j].x, second[j].x, first[j].y, second[j].y, digit.x, digit.y, zeros);
        else
          multiply_bytes(c, first[j].x, second[j].x, first[j].y, second[j].y, digit.x, digit.y);
      }
      // The even lane of two has s0 and s1 of both rows, the odd one s2. Each keeps its row and sends what is the
      // other's.
      const float low = fmaf(unshifted(c[1]), 256.0f, unshifted(c[0])),
                  other_low = fmaf(unshifted(c[3]), 256.0f, unshifted(c[2]));
      const float got = __shfl_xor_sync(everyone, is_second ? unshifted(c[0]) : other_low, 1);
      const float total = fmaf(is_second ? unshifted(c[2]) : got, 65536.0f, is_second ? got : low);
      const DigitGroup own = x.groups[(from / steps + group) * x.present + min(2 * p + t / 2, x.present - 1)];
      sums[p] = with_group(sums[p], total, by, own);
    }
  }
#pragma unroll
  for (u32 p = 0; p < few_pairs; p++) totals[p] += sums[p];
}

// Of the rows of a pair, the lanes 4 g + t have x's row t / 2 and the tile's row g, or g + 8 where t is odd. `rows` are
// the two rows of the lane, whatever t is.
// `few_ahead`: parts of a tile that a warp has in registers.
template <u32 bits, u32 steps, u32 few_ahead>
DEV void outputs_of_few(TwoRows<bits> rows, const Storage& stored, const u8* digits, const DigitGroup* groups,
                        u64 block, const FewRows& x, float (&totals)[few_pairs]) {
  // A lane's own scales are those of row g, or of row g + 8.
  if (lane_of() & 1) rows.scales[0] = rows.scales[1], rows.biases[0] = rows.biases[1];
  const int zero = int(shifted_zero + blockDim.y - 1);
  const u32 parts = stored.parts();
  const auto count_of = [&](u32 part) { return min(part_steps, stored.steps() - part * part_steps); };
  PartOfRows<bits, steps> ahead[few_ahead];
  const auto load = [&](PartOfRows<bits, steps>& to, u32 part) {
    if (part < parts) to.load(rows, stored, part * part_steps, count_of(part), true, false);
  };
#pragma unroll
  for (u32 i = 0; i < few_ahead; i++) load(ahead[i], i);
#pragma unroll
  for (u32 p = 0; p < few_pairs; p++) totals[p] = 0.0f;
  constexpr u32 slab_parts = few_slab_steps / part_steps;
  static_assert(slab_parts % few_ahead == 0, "a slab begins with the first of the parts ahead");
  for (u32 slab = 0; slab < parts; slab += slab_parts) {
    const u32 first = slab * part_steps, end = min(slab + slab_parts, parts);
    if (slab > 0) __syncthreads();
    bring_few(stored, digits, groups, block, first, min(few_slab_steps, stored.steps() - first), x);
    __syncthreads();
#pragma unroll 1
    for (u32 at = slab; at < end; at += few_ahead)
#pragma unroll
      for (u32 k = 0; k < few_ahead; k++) {
        const u32 part = at + k;
        if (part >= end) break;
        add_few<bits, steps>(ahead[k], stored, x, part * part_steps - first, count_of(part), zero, totals);
        load(ahead[k], part + few_ahead);
      }
  }
}
