// Many rows of x. A block takes rows of the matrix through some rows of x: each warp has a tile of the matrix of its
// own, whose codes are in registers, and all share the digits of x, which come to shared memory a part at a time, while
// the parts before are multiplied.
#pragma once
#include "products.h"

constexpr u32 many_fragments = many_rows / fragment_rows;
constexpr u32 many_stages = 3;  // parts of x that a block has room for
constexpr u32 copy_bytes = 16;
constexpr u32 many_threads = many_warps * lanes;
constexpr u32 many_blocks = 4;  // of a multiprocessor
DEV u32 fragments_of(u32 rows) { return (rows + fragment_rows - 1) / fragment_rows; }

// A part of x: digits as the tensor core takes them, and groups.
template <u32 most>
struct PartOfX {
  uint2 digits[many_fragments][part_steps][digits_of_number][lanes];
  DigitGroup groups[many_fragments][most][fragment_rows];
};
template <u32 bits, u32 steps>
using PartFor = PartOfX<PartOfRows<bits, steps>::most>;

// Where the rows of x of a block are among all digits.
struct ManyRows {
  const u8* digits;
  const DigitGroup* groups;
  u64 block;    // the first fragment
  u32 present;  // fragments that have rows
};

// What a thread copies of each part, at most. Those of a part that is not whole are fewer.
template <u32 bits, u32 steps>
struct ManyCopies {
  static constexpr u32 step_bytes = digits_of_number * lanes * sizeof(uint2), most = PartOfRows<bits, steps>::most;
  static constexpr u32 of_fragment = part_steps * step_bytes / copy_bytes;
  static constexpr u32 of_groups = most * fragment_rows * sizeof(DigitGroup) / copy_bytes;
  static constexpr u32 each = (many_fragments * of_fragment + many_threads - 1) / many_threads;
  static constexpr u32 group_each = (many_fragments * of_groups + many_threads - 1) / many_threads;
  const u8* digits[each];
  const u8* groups[group_each];

  DEV ManyCopies(const ManyRows& x, const Storage& stored) {
#pragma unroll
    for (u32 j = 0; j < each; j++) {
      const u32 i = j * many_threads + threadIdx.x;
      digits[j] = x.digits + (x.block + i / of_fragment) * stored.steps() * step_bytes + i % of_fragment * copy_bytes;
    }
#pragma unroll
    for (u32 j = 0; j < group_each; j++) {
      const u32 i = j * many_threads + threadIdx.x;
      groups[j] = reinterpret_cast<const u8*>(x.groups) +
                  (x.block + i / of_groups) * stored.groups() * fragment_rows * sizeof(DigitGroup) +
                  i % of_groups * copy_bytes;
    }
  }

  DEV void bring(u32 part, u32 count, u32 present, PartFor<bits, steps>& to) const {
#pragma unroll
    for (u32 j = 0; j < each; j++) {
      const u32 i = j * many_threads + threadIdx.x;
      if (i < present * of_fragment && i % of_fragment < count * (step_bytes / copy_bytes))
        copy_16(reinterpret_cast<u8*>(to.digits) + i * copy_bytes, digits[j] + part * (part_steps * step_bytes));
    }
#pragma unroll
    for (u32 j = 0; j < group_each; j++) {
      const u32 i = j * many_threads + threadIdx.x;
      if (i < present * of_groups && i % of_groups < count / steps * (of_groups / most))
        copy_16(reinterpret_cast<u8*>(to.groups) + i * copy_bytes, groups[j] + part * (of_groups * copy_bytes));
    }
  }
};

// Sums of the warp's tile with the rows of x: lane 4 g + t has the rows g (i < 2) and g + 8 of the tile, with rows 2 t
// and 2 t + 1 of x of a fragment.
struct ManySums {
  float of[many_fragments][4];
};

template <u32 bits, u32 steps>
DEV void add_part(const PartOfRows<bits, steps>& rows, const Storage& stored, const PartFor<bits, steps>& x,
                  u32 present, u32 count, int zero, ManySums& totals) {
  constexpr u32 most = PartOfRows<bits, steps>::most;
  const u32 lane = lane_of(), t = lane % 4;
  const int zeros[4] = {zero, zero, zero, zero};
  ManySums sums = {};
#pragma unroll
  for (u32 group = 0; group < most; group++) {
    if (group * steps >= count) break;
    uint2 codes[steps][2];
    Scaling by[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
#pragma unroll
      for (u32 j = 0; j < steps; j++) codes[j][i] = rows.codes[i][group * steps + j].bytes();
      by[i] = rows.scaling(i, group, stored.number);
    }
#pragma unroll
    for (u32 f = 0; f < many_fragments; f++) {
      if (f >= present) break;
      int c[digits_of_number][4];
#pragma unroll
      for (u32 d = 0; d < digits_of_number; d++)
#pragma unroll
        for (u32 j = 0; j < steps; j++) {
          const uint2 low = codes[j][0], high = codes[j][1], digit = x.digits[f][group * steps + j][d][lane];
          if (j == 0)
            multiply_bytes(c[d], low.x, high.x, low.y, high.y, digit.x, digit.y, zeros);
          else
            multiply_bytes(c[d], low.x, high.x, low.y, high.y, digit.x, digit.y);
        }
      const float4 two = reinterpret_cast<const float4*>(x.groups[f][group])[t];
      const DigitGroup own[2] = {{two.x, two.y}, {two.z, two.w}};
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        // The same as total_of_digits: all three are whole, and the inner sum is rounded once.
        const float total = fmaf(unshifted(c[2][i]), 65536.0f, fmaf(unshifted(c[1][i]), 256.0f, unshifted(c[0][i])));
        sums.of[f][i] = with_group(sums.of[f][i], total, by[i / 2], own[i % 2]);
      }
    }
  }
#pragma unroll
  for (u32 f = 0; f < many_fragments; f++)
#pragma unroll
    for (u32 i = 0; i < 4; i++) totals.of[f][i] += sums.of[f][i];
}

// `rows` are the two rows of the lane.
template <u32 bits, u32 steps, class WaitForX>
DEV void outputs_of_many(const Storage& stored, const ManyRows& x, PartFor<bits, steps> (&shared)[many_stages],
                         const TwoRows<bits>& rows, WaitForX wait_for_x, ManySums& totals) {
  const u32 parts = stored.parts();
  const int zero = int(shifted_zero + blockDim.y - 1);
  const auto count_of = [&](u32 part) { return min(part_steps, stored.steps() - part * part_steps); };
  PartOfRows<bits, steps> next;
  const auto load = [&](u32 part) { next.load(rows, stored, part * part_steps, count_of(part), true, true); };
  load(0);
  const ManyCopies<bits, steps> copies(x, stored);
  wait_for_x();
#pragma unroll
  for (u32 i = 0; i < many_stages - 1; i++) {
    if (i < parts) copies.bring(i, count_of(i), x.present, shared[i]);
    end_of_copies();
  }
#pragma unroll
  for (u32 f = 0; f < many_fragments; f++)
#pragma unroll
    for (u32 i = 0; i < 4; i++) totals.of[f][i] = 0.0f;
  u32 stage = 0;
#pragma unroll 1
  for (u32 part = 0; part < parts; part++) {
    wait_for_copies<many_stages - 2>();
    __syncthreads();  // all copies of this part are there, and nobody reads the one before
    const u32 coming = part + many_stages - 1;
    if (coming < parts)
      copies.bring(coming, count_of(coming), x.present, shared[(stage + many_stages - 1) % many_stages]);
    end_of_copies();
    const PartOfRows<bits, steps> now = next;
    if (part + 1 < parts) load(part + 1);
    add_part<bits, steps>(now, stored, shared[stage], x.present, count_of(part), zero, totals);
    stage = (stage + 1) % many_stages;
  }
}
