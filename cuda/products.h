// Products of matrices as stored with rows of f32, exact as far as that goes.
//
// An affine weight is code * scale + bias. A group of columns shares scale and bias, and its x becomes whole numbers of
// 22 bits and a sign that share a power of two, `unit`. Such a number is three digits, each a signed byte. So a group's
// sums of code times digit are whole numbers below 2^23, exact in whatever order a tensor core adds them, and every way
// to make them gives the same bits. What follows has one order:
//
//   t = s2 * 2^16 + (s1 * 2^8 + s0)          of the sums with the three digits: the bracket is a whole number, rounded
//   part += (scale * t + bias * sum) * unit  groups in the order of the columns, within a part of 128 columns;
//                                            `sum` is that of the group's whole numbers
//   out += part                              parts in the order of the columns
//
// A group of x that has a NaN or an infinity makes NaN of every output.
//
// A weight of MXFP4 is (byte - 12) * scale / 2, its byte being 0 to 24. So it is affine, too.
#pragma once
#include "operands.h"

// ---- One row of x ---------------------------------------------------------------------------------------------------

// What a block shares: the digits of as many columns as there is room for, and the parts of its outputs, of one tile
// and of the next.
struct OneRow {
  uint2 digits[slab_parts * part_steps][digits_of_number * 4];  // [step][digit, lane of four]
  DigitGroup groups[slab_parts * part_steps];
  float parts[2][slab_parts][tile_rows];
  float squares[row_threads / lanes];
};

// A row of x, and perhaps the norm that comes first.
struct RowOfX {
  const float* x;
  const float* weight;  // null: none
  float factor;
  float* kept;  // where the norm's output belongs, or null

  // Numbers index * pack ... of those from column `first` on, 0 behind `end`.
  DEV void pack_at(u32 first, u32 index, u32 end, float (&numbers)[pack]) const {
    pack_of_x(x + first, index * pack, end - first, numbers);
    if (weight == nullptr) return;
    float weights[pack];
    pack_of_x(weight + first, index * pack, end - first, weights);
#pragma unroll
    for (u32 i = 0; i < pack; i++) numbers[i] = normed(numbers[i], factor, weights[i]);
    if (kept == nullptr || first + index * pack >= end) return;
#pragma unroll
    for (u32 i = 0; i < pack; i++) kept[first + index * pack + i] = numbers[i];
  }
};

// Steps first ... first + count - 1 of x into shared memory. All threads.
DEV void bring_digits(const RowOfX& x, const Storage& stored, u32 first, u32 count, OneRow& shared) {
  const u32 packs = count * 4;
  for (u32 base = warp_of() * lanes; base < packs; base += blockDim.x) {
    const u32 index = base + lane_of();
    float numbers[pack];
    x.pack_at(first * step_columns, index, (first + count) * step_columns, numbers);
    DigitGroup group;
    const Digits digits = digits_of(numbers, stored.group_steps, group);
    if (index >= packs) continue;
    const PackPlace at = place_of_pack(index, stored.group_steps);
#pragma unroll
    for (u32 d = 0; d < digits_of_number; d++) shared.digits[at.step][d * 4 + at.lane] = digits.of[d];
    if (at.lane == 0 && at.step % stored.group_steps == 0) shared.groups[at.step / stored.group_steps] = group;
  }
}

// One part of the lane's row g (lane t = 0 of four) or g + 8 (t = 1). x_of(j) is what the lane has of x in step j:
// digit g of a pack, or zeros. group_of(i) is that of x.
template <u32 bits, u32 steps, class XOf, class GroupOf>
DEV float part_of_row(const PartOfRows<bits, steps>& part, const Storage& stored, u32 count, XOf x_of,
                      GroupOf group_of) {
  const u32 of_group = steps ? steps : stored.group_steps;
  const bool is_second = lane_of() & 1;
  float sum = 0.0f;
  int c[4] = {};
#pragma unroll
  for (u32 j = 0; j < part_steps; j++) {
    if (j >= count) break;
    const uint2 first = part.codes[0][j].bytes(), second = part.codes[1][j].bytes();
    const uint2 x = x_of(j);
    multiply_bytes(c, first.x, second.x, first.y, second.y, x.x, x.y);
    if ((j + 1) % of_group != 0) continue;
    // Lane t = 0 has s0 and s1 of both rows, lane t = 1 has s2. Each keeps its row and sends what is the other's.
    const int s01 = c[1] * 256 + c[0], other_s01 = c[3] * 256 + c[2];
    const int got = __shfl_xor_sync(everyone, is_second ? c[0] : other_s01, 1);
    const float total = fmaf(float(is_second ? c[2] : got), 65536.0f, float(is_second ? got : s01));
    const u32 group = steps ? j / steps : j / of_group;
    sum = with_group(sum, total, part.scaling(0, group, stored.number), group_of(group));
    c[0] = c[1] = c[2] = c[3] = 0;
  }
  return sum;
}

// The same with digits in shared memory, where `from` is the part's first step.
template <u32 bits, u32 steps>
DEV float part_of_one(const PartOfRows<bits, steps>& part, const Storage& stored, u32 from, u32 count,
                      const OneRow& shared) {
  const u32 g = lane_of() / 4, t = lane_of() % 4, of_group = steps ? steps : stored.group_steps;
  const auto x_of = [&](u32 j) { return g < digits_of_number ? shared.digits[from + j][g * 4 + t] : make_uint2(0, 0); };
  return part_of_row<bits, steps>(part, stored, count, x_of,
                                  [&](u32 group) { return shared.groups[from / of_group + group]; });
}

// Tiles of sixteen outputs of one row of x, for a block: count of them. rows_of(i) are the two rows of the lane in
// tile i, and out(i, row, sum) takes the sums, in the first warp: lanes below tile_rows have one. What the first parts
// need is loaded before x is there, which x_when_there() gives, and what the next needs before a part is multiplied.
template <u32 bits, u32 steps, class RowsOf, class XWhenThere, class Out>
DEV void outputs_of_one(const Storage& stored, u32 count, OneRow& shared, RowsOf rows_of, XWhenThere x_when_there,
                        Out out) {
  const u32 lane = lane_of(), g = lane / 4, t = lane % 4, warps = blockDim.x / lanes;
  constexpr u32 slab_steps = slab_parts * part_steps;
  // A lane's own scales are those of row g, or of row g + 8.
  const auto load = [&](PartOfRows<bits, steps>& part, u32 tile, u32 step, u32 end) {
    TwoRows<bits> rows = rows_of(tile);
    if (t & 1) rows.scales[0] = rows.scales[1], rows.biases[0] = rows.biases[1];
    part.load(rows, stored, step, min(part_steps, end - step), true, false);
  };
  PartOfRows<bits, steps> next;
  const u32 first_step = warp_of() * part_steps;
  if (count > 0 && first_step < min(slab_steps, stored.steps()))
    load(next, 0, first_step, min(slab_steps, stored.steps()));
  const RowOfX x = x_when_there();
  for (u32 tile = 0; tile < count; tile++) {
    float total = 0.0f;
    for (u32 first = 0; first < stored.steps(); first += slab_steps) {
      const u32 slab = first / slab_steps, slabs = (stored.steps() + slab_steps - 1) / slab_steps;
      const u32 end = min(first + slab_steps, stored.steps()), parts = (end - first + part_steps - 1) / part_steps;
      float (&sums)[slab_parts][tile_rows] = shared.parts[(tile * slabs + slab) % 2];
      if (tile == 0 || slabs > 1) {
        if (tile > 0 || slab > 0) __syncthreads();
        bring_digits(x, stored, first, end - first, shared);
        __syncthreads();
      }
      for (u32 part = warp_of(); part < parts; part += warps) {
        const PartOfRows<bits, steps> now = next;
        const u32 from = part * part_steps;
        if (part + warps < parts) {
          load(next, tile, first + from + warps * part_steps, end);
        } else if (slab + 1 < slabs) {
          if (end + first_step < stored.steps())
            load(next, tile, end + first_step, min(end + slab_steps, stored.steps()));
        } else if (tile + 1 < count) {
          load(next, tile + 1, first_step, min(slab_steps, stored.steps()));
        }
        const float sum = part_of_one<bits, steps>(now, stored, from, min(part_steps, end - first - from), shared);
        if (t < 2) sums[part][g + t * 8] = sum;
      }
      __syncthreads();
      if (threadIdx.x < tile_rows)
        for (u32 part = 0; part < parts; part++) total += sums[part][threadIdx.x];
    }
    if (threadIdx.x < lanes) out(tile, threadIdx.x, total);
  }
}

// ---- Several rows of x ----------------------------------------------------------------------------------------------

// A float of 1.5 * 2^23. Integers below 2^22 in size that are added to its bits are added to its value. A kernel makes
// it of a number that the compiler does not know, or it would be made again for every product.
constexpr u32 shifted_zero = 0x4b400000u;
DEV float unshifted(int bits) { return __uint_as_float(u32(bits)) - __uint_as_float(shifted_zero); }

// Digits lie as the tensor core takes them: of eight rows together, [step][digit][lane], and their groups [group][row].
DEV u64 digits_at(u64 block, u32 steps, u32 step, u32 digit) {
  return ((block * steps + step) * digits_of_number + digit) * lanes;
}

// What a block shares: the parts that its warps have just made, and those of the time before.
struct SomeRows {
  float parts[2][one_warps][tile_rows][few_rows + 1];
};

// A part of the rows of x of a fragment, of which `present` are there; the digits of others are taken to be zeros.
template <u32 bits, u32 steps>
struct SomeX {
  static constexpr u32 most = PartOfRows<bits, steps>::most;
  uint2 digits[part_steps][digits_of_number];
  float4 groups[most];

  DEV void load(const Storage& stored, const uint2* from, const DigitGroup* from_groups, u64 block, u32 present,
                u32 step, u32 count) {
    const u32 lane = lane_of(), of_group = steps ? steps : stored.group_steps;
#pragma unroll
    for (u32 j = 0; j < part_steps; j++)
#pragma unroll
      for (u32 d = 0; d < digits_of_number; d++)
        digits[j][d] = j < count && lane / 4 < present ? from[digits_at(block, stored.steps(), step + j, d) + lane]
                                                       : make_uint2(0, 0);
#pragma unroll
    for (u32 i = 0; i < most; i++)
      if (i * of_group < count)
        groups[i] = *reinterpret_cast<const float4*>(
            from_groups + (block * stored.groups() + step / of_group + i) * fragment_rows + 2 * (lane % 4));
  }
};

// One part of sixteen rows of the matrix and the rows of x of a fragment, into shared memory.
template <u32 bits, u32 steps>
DEV void part_of_some(const PartOfRows<bits, steps>& part, const Storage& stored, const SomeX<bits, steps>& x,
                      u32 count, float (&parts)[tile_rows][few_rows + 1]) {
  const u32 lane = lane_of(), g = lane / 4, t = lane % 4, of_group = steps ? steps : stored.group_steps;
  constexpr u32 most = PartOfRows<bits, steps>::most;
  float sums[4] = {};
  int c[digits_of_number][4] = {};
#pragma unroll
  for (u32 j = 0; j < part_steps; j++) {
    if (j >= count) break;
    const uint2 first = part.codes[0][j].bytes(), second = part.codes[1][j].bytes();
#pragma unroll
    for (u32 d = 0; d < digits_of_number; d++)
      multiply_bytes(c[d], first.x, second.x, first.y, second.y, x.digits[j][d].x, x.digits[j][d].y);
    if ((j + 1) % of_group != 0) continue;
    const u32 group = steps ? j / steps : j / of_group;
    const Scaling by[2] = {part.scaling(0, group, stored.number), part.scaling(1, group, stored.number)};
    float4 two = {};
#pragma unroll
    for (u32 i = 0; i < most; i++)
      if (i == group) two = x.groups[i];
    const DigitGroup own[2] = {{two.x, two.y}, {two.z, two.w}};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {  // row g, then g + 8, each with rows 2 t and 2 t + 1 of x
      sums[i] = with_group(sums[i], total_of_digits(c[0][i], c[1][i], c[2][i]), by[i / 2], own[i % 2]);
      c[0][i] = c[1][i] = c[2][i] = 0;
    }
  }
#pragma unroll
  for (u32 i = 0; i < 4; i++) parts[g + i / 2 * 8][2 * t + i % 2] = sums[i];
}

// Tiles of sixteen outputs of some rows of x, for a block: count of them. rows_of(i) are the two rows of the lane in
// tile i, and out(i, row, place, sum) takes the sums. `block` is the fragment of the digits, which has `present` rows.
// Each warp has a part of all tiles, or several; codes of the next part come while one is multiplied. Where it has one
// part, its digits stay in registers.
template <u32 bits, u32 steps, class RowsOf, class WaitForX, class Out>
DEV void outputs_of_some(const Storage& stored, u32 count, RowsOf rows_of, const u8* digits, const DigitGroup* groups,
                         u64 block, u32 present, SomeRows& shared, WaitForX wait_for_x, Out out) {
  const u32 warps = blockDim.x / lanes, parts = stored.parts(), slabs = (parts + warps - 1) / warps;
  const auto count_of = [&](u32 part) { return min(part_steps, stored.steps() - part * part_steps); };
  const auto load = [&](PartOfRows<bits, steps>& to, u32 turn) {
    const u32 tile = turn / slabs, part = turn % slabs * warps + warp_of();
    if (tile < count && part < parts) to.load(rows_of(tile), stored, part * part_steps, count_of(part), true, true);
  };
  constexpr u32 some_ahead = steps ? 2 : 1;  // parts of the matrix that a warp has in registers
  PartOfRows<bits, steps> ahead[some_ahead];
#pragma unroll
  for (u32 i = 0; i < some_ahead; i++) load(ahead[i], i);
  wait_for_x();
  SomeX<bits, steps> x;
  float total = 0.0f;
#pragma unroll 1
  for (u32 first = 0; first < count * slabs; first += some_ahead)
#pragma unroll
    for (u32 i = 0; i < some_ahead; i++) {
      const u32 turn = first + i, slab = turn % slabs, part = slab * warps + warp_of();
      if (turn >= count * slabs) break;
      if (part < parts) {
        if (turn == 0 || slabs > 1)
          x.load(stored, reinterpret_cast<const uint2*>(digits), groups, block, present, part * part_steps,
                 count_of(part));
        part_of_some<bits, steps>(ahead[i], stored, x, count_of(part), shared.parts[turn % 2][warp_of()]);
      }
      load(ahead[i], turn + some_ahead);
      __syncthreads();
      for (u32 at = threadIdx.x; at < tile_rows * few_rows; at += blockDim.x) {
        float sum = slab == 0 ? 0.0f : total;  // several slabs have a thread for each output
        const u32 row = at % tile_rows, place = at / tile_rows;
        for (u32 j = 0; j < min(warps, parts - slab * warps); j++) sum += shared.parts[turn % 2][j][row][place];
        total = sum;
        if (slab + 1 == slabs) out(turn / slabs, row, place, sum);
      }
    }
}

// Whose outputs a tile has.
struct OutputPlace {
  StoredMatrix matrix;
  float* out;
  u32 rows;
  u32 out_stride;
  u32 row;  // the first of the tile
};
DEV OutputPlace output_of_tile(const ProductParams& params, u32 tile) {
  OutputPlace at = {params.matrix, params.out, params.rows, params.out_stride, tile * tile_rows};
#pragma unroll
  for (u32 j = 0; j < most_outputs - 1; j++) {
    const MoreOutput& more = params.more[j];
    if (tile >= more.first_tile)
      at = {more.matrix, more.out, more.rows, more.out_stride, (tile - more.first_tile) * tile_rows};
  }
  return at;
}
DEV Storage storage_of(const ProductParams& params) { return {params.columns, params.group_steps, params.number}; }

// Instances for every way in which codes may be stored: of `bits`, and those where a group's steps are known and all is
// aligned. Those of MXFP4 always are.
#define FOR_ALL_BITS(instance) instance(2) instance(3) instance(4) instance(5) instance(6) instance(8) instance(20)
#define FOR_KNOWN_FORMATS(instance) instance(4_32, 4, 1) instance(4_64, 4, 2) instance(8_64, 8, 2) instance(20, 20, 1)
#define FOR_OTHER_FORMATS(instance) \
  instance(2, 2, 0) instance(3, 3, 0) instance(4, 4, 0) instance(5, 5, 0) instance(6, 6, 0) instance(8, 8, 0)
#define FOR_ALL_FORMATS(instance) FOR_OTHER_FORMATS(instance) FOR_KNOWN_FORMATS(instance)
