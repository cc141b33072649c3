// Many rows of x. A block takes rows of the matrix through some rows of x: each warp has a tile of the matrix of its
// own, whose codes are in registers, and all share the digits of x, which come to shared memory a part at a time, while
// the parts before are multiplied. `fragments` are those of a block: of many_rows, or of most_rows.
#pragma once
#include "products.h"

constexpr u32 copy_bytes = 16;
constexpr u32 many_threads = many_warps * lanes;
constexpr u32 many_fragments = many_rows / fragment_rows;
constexpr u32 most_fragments = most_rows / fragment_rows;
constexpr u32 many_blocks = 3;  // of a multiprocessor
constexpr u32 most_blocks = 2;  // of blocks of most_rows, and of others that overlap products with sums
DEV u32 fragments_of(u32 rows) { return (rows + fragment_rows - 1) / fragment_rows; }

// A part of x: digits as the tensor core takes them, and groups.
template <u32 most, u32 fragments>
struct PartOfX {
  u32 digits[fragments][part_steps][digits_of_number][2][lanes];
  DigitGroup groups[fragments][most][fragment_rows];
};
template <u32 bits, u32 steps, u32 fragments>
struct PartsFor {
  PartOfX<PartOfRows<bits, steps>::most, fragments> of[many_stages];
};
template <u32 bits, u32 steps, u32 fragments>
using PartFor = PartOfX<PartOfRows<bits, steps>::most, fragments>;

// Whether all parts of the columns are whole.
template <u32 bits, u32 steps>
DEV constexpr bool is_whole() {
  return PartOfRows<bits, steps>::in_words;
}

// Where the rows of x of a block are among all digits.
struct ManyRows {
  const u8* digits;
  const DigitGroup* groups;
  u64 block;    // the first fragment
  u32 present;  // fragments that have rows
};

// What a thread copies of each part: a warp brings fragments.
template <u32 bits, u32 steps, u32 fragments>
struct ManyCopies {
  static constexpr u32 step_bytes = digits_of_number * lanes * sizeof(uint2), most = PartOfRows<bits, steps>::most;
  static constexpr u32 each = part_steps * step_bytes / copy_bytes / lanes;
  static constexpr u32 group_bytes = fragment_rows * sizeof(DigitGroup);
  static constexpr u32 warps = many_warps;
  static_assert(fragments % warps == 0 && step_bytes * part_steps == each * lanes * copy_bytes, "all is copied");
  static_assert(most * group_bytes <= lanes * copy_bytes, "groups of a part are one copy of a lane");
  const u8* digits;
  const u8* groups;
  u64 fragment_bytes;  // of digits
  u64 fragment_group_bytes;
  u32 present;

  DEV ManyCopies(const ManyRows& x, const Storage& stored) {
    const u64 fragment = x.block + warp_of();
    const u32 at = lane_of() * copy_bytes;
    fragment_bytes = stored.steps() * step_bytes;
    fragment_group_bytes = stored.groups() * group_bytes;
    digits = x.digits + fragment * fragment_bytes + at;
    groups = reinterpret_cast<const u8*>(x.groups) + fragment * fragment_group_bytes + at;
    present = x.present;
  }

  DEV void bring(u32 part, u32 count, PartFor<bits, steps, fragments>& to) const {
    const u32 at = lane_of() * copy_bytes;
    const u8* from = digits + part * (part_steps * step_bytes);
    const u8* from_groups = groups + part * (most * group_bytes);
#pragma unroll
    for (u32 f = warp_of(); f < fragments; f += warps) {
      if (f >= present) break;
      u8* shared = reinterpret_cast<u8*>(to.digits[f]) + at;
#pragma unroll
      for (u32 j = 0; j < each; j++)
        if (is_whole<bits, steps>() || j * lanes * copy_bytes + at < count * step_bytes)
          copy_16(shared + j * lanes * copy_bytes, from + j * lanes * copy_bytes);
      if (at < count / steps * group_bytes) copy_16(reinterpret_cast<u8*>(to.groups[f]) + at, from_groups);
      from += warps * fragment_bytes, from_groups += warps * fragment_group_bytes;
    }
  }
};

// Sums of the warp's tile with the rows of x: lane 4 g + t has the rows g (i < 2) and g + 8 of the tile, with rows 2 t
// and 2 t + 1 of x of a fragment.
template <u32 fragments>
struct ManySums {
  float of[fragments][4];
};

#if defined(MOEFLUX_WARPGROUPS)
template <u32 steps, u32 fragments>
DEV void multiply_columns_of(const uint2 (&codes)[steps][2], u64 columns, u32 digit_bytes,
                             int (&c)[digits_of_number][fragments][4]) {
  begin_products();
#pragma unroll
  for (u32 j = 0; j < steps; j++)
#pragma unroll
    for (u32 d = 0; d < digits_of_number; d++) {
      const uint2 low = codes[j][0], high = codes[j][1];
      const u64 at = behind(columns, (j * digits_of_number + d) * digit_bytes);
      if (j == 0)
        multiply_columns<false>(c[d], low.x, high.x, low.y, high.y, at);
      else
        multiply_columns<true>(c[d], low.x, high.x, low.y, high.y, at);
    }
  end_products();
}
#endif

// Sums of a group's codes with each digit of the rows of x. Digits are those of steps `step` ... of a part.
template <u32 steps, u32 fragments, class Part>
DEV void multiply_group(const uint2 (&codes)[steps][2], const Part& x, u32 step, u32 present,
                        int (&c)[digits_of_number][fragments][4]) {
#if defined(MOEFLUX_WARPGROUPS)
  const u64 columns = shared_columns(x.digits[0][step], sizeof x.digits[0]);
  constexpr u32 digit_bytes = sizeof x.digits[0][0][0];
  if (present > fragments / 2) {
    multiply_columns_of<steps, fragments>(codes, columns, digit_bytes, c);
    await_products<0>(c);
    return;
  }
  int half[digits_of_number][fragments / 2][4];
  multiply_columns_of<steps, fragments / 2>(codes, columns, digit_bytes, half);
  await_products<0>(half);
#pragma unroll
  for (u32 d = 0; d < digits_of_number; d++)
#pragma unroll
    for (u32 f = 0; f < fragments / 2; f++)
#pragma unroll
      for (u32 i = 0; i < 4; i++) c[d][f][i] = half[d][f][i];
#else
  const u32 lane = lane_of();
#pragma unroll
  for (u32 f = 0; f < fragments; f++) {
    if (f >= present) break;
#pragma unroll
    for (u32 d = 0; d < digits_of_number; d++) {
      c[d][f][0] = c[d][f][1] = c[d][f][2] = c[d][f][3] = 0;
#pragma unroll
      for (u32 j = 0; j < steps; j++) {
        const uint2 low = codes[j][0], high = codes[j][1];
        const u32(&digits)[2][lanes] = x.digits[f][step + j][d];
        multiply_bytes(c[d][f], low.x, high.x, low.y, high.y, digits[0][lane], digits[1][lane]);
      }
    }
  }
#endif
}

#if defined(MOEFLUX_WARPGROUPS)
// add_part of a whole part, of four fragments or of eight. Products of four are under way while sums of the four before
// are made, and nothing is decided in between: what fragments that are not there yield is never looked at.
template <u32 pieces, u32 bits, u32 steps, u32 fragments>
DEV void add_whole_part(const PartOfRows<bits, steps>& rows, const Storage& stored,
                        const PartFor<bits, steps, fragments>& x, ManySums<fragments>& totals) {
  constexpr u32 most = PartOfRows<bits, steps>::most, some = 4, all = most * pieces;
  const u32 t = lane_of() % 4;
  Scaling by[most][2];
#pragma unroll
  for (u32 group = 0; group < most; group++)
#pragma unroll
    for (u32 i = 0; i < 2; i++) by[group][i] = rows.scaling(i, group, stored.number);
  int c[2][digits_of_number][some][4];
  const auto begin = [&](u32 i) {
    const u32 group = i / pieces, piece = i % pieces;
    uint2 codes[steps][2];
#pragma unroll
    for (u32 j = 0; j < steps; j++)
#pragma unroll
      for (u32 r = 0; r < 2; r++) {
        codes[j][r] = rows.codes[r][group * steps + j].bytes();
        codes[j][r].x = made_once(codes[j][r].x), codes[j][r].y = made_once(codes[j][r].y);
      }
    multiply_columns_of<steps, some>(codes, shared_columns(x.digits[piece * some][group * steps], sizeof x.digits[0]),
                                     sizeof x.digits[0][0][0], c[i % 2]);
  };
  begin(0);
  if (all > 1) begin(1);
  ManySums<fragments> sums;
#pragma unroll
  for (u32 i = 0; i < all; i++) {
    const u32 group = i / pieces, piece = i % pieces;
    if (i + 1 < all)
      await_products<1>(c[i % 2]);
    else
      await_products<0>(c[i % 2]);
#pragma unroll
    for (u32 k = 0; k < some; k++) {
      const u32 f = piece * some + k;
      const float4 two = reinterpret_cast<const float4*>(x.groups[f][group])[t];
      const DigitGroup own[2] = {{two.x, two.y}, {two.z, two.w}};
      const auto& sum = c[i % 2];
#pragma unroll
      for (u32 j = 0; j < 4; j++)
        sums.of[f][j] =
            with_group(group ? sums.of[f][j] : 0.0f, total_of_digits(sum[0][k][j], sum[1][k][j], sum[2][k][j]),
                       by[group][j / 2], own[j % 2]);
    }
    if (i + 2 < all) begin(i + 2);
  }
#pragma unroll
  for (u32 f = 0; f < pieces * some; f++)
#pragma unroll
    for (u32 j = 0; j < 4; j++) totals.of[f][j] += sums.of[f][j];
}
#endif

// `overlaps` where the block has registers for products that are under way.
template <u32 bits, u32 steps, bool overlaps, u32 fragments>
DEV void add_part(const PartOfRows<bits, steps>& rows, const Storage& stored, const PartFor<bits, steps, fragments>& x,
                  u32 present, u32 count, ManySums<fragments>& totals) {
#if defined(MOEFLUX_WARPGROUPS)
  // Where parts may not be whole, both ways in one kernel would need more registers than there are.
  if constexpr (overlaps && is_whole<bits, steps>()) {
    if constexpr (fragments != most_fragments)
      add_whole_part<1>(rows, stored, x, totals);
    else if (present > fragments / 2)
      add_whole_part<2>(rows, stored, x, totals);
    else
      add_whole_part<1>(rows, stored, x, totals);
    return;
  }
#endif
  constexpr u32 most = PartOfRows<bits, steps>::most;
  const u32 t = lane_of() % 4;
  ManySums<fragments> sums;
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
    int c[digits_of_number][fragments][4];
    multiply_group<steps, fragments>(codes, x, group * steps, present, c);
#pragma unroll
    for (u32 f = 0; f < fragments; f++) {
      if (f >= present) break;
      const float4 two = reinterpret_cast<const float4*>(x.groups[f][group])[t];
      const DigitGroup own[2] = {{two.x, two.y}, {two.z, two.w}};
#pragma unroll
      for (u32 i = 0; i < 4; i++)
        sums.of[f][i] = with_group(group ? sums.of[f][i] : 0.0f, total_of_digits(c[0][f][i], c[1][f][i], c[2][f][i]),
                                   by[i / 2], own[i % 2]);
    }
  }
#pragma unroll
  for (u32 f = 0; f < fragments; f++) {
    if (f >= present) break;
#pragma unroll
    for (u32 i = 0; i < 4; i++) totals.of[f][i] += sums.of[f][i];
  }
}

// `rows` are the two rows of the lane.
template <u32 bits, u32 steps, u32 fragments, bool overlaps, class WaitForX>
DEV void outputs_of_many(const Storage& stored, const ManyRows& x, void* room, const TwoRows<bits>& rows,
                         WaitForX wait_for_x, ManySums<fragments>& totals) {
  auto& shared = static_cast<PartsFor<bits, steps, fragments>*>(room)->of;
  static_assert(sizeof shared == many_bytes(steps, fragments), "the host knows how large a block's parts are");
  const u32 parts = stored.parts();
  const auto count_of = [&](u32 part) {
    return is_whole<bits, steps>() ? part_steps : min(part_steps, stored.steps() - part * part_steps);
  };
  PartOfRows<bits, steps> next;
  const auto load = [&](u32 part) { next.load(rows, stored, part * part_steps, count_of(part), true, true); };
  load(0);
  const ManyCopies<bits, steps, fragments> copies(x, stored);
  wait_for_x();
  if (threadIdx.x == 0) {  // fragments that are not there are multiplied, too
#pragma unroll
    for (u32 i = 0; i < many_stages; i++) {
      may_be_anything(shared[i].digits[x.present], (fragments - x.present) * sizeof shared[i].digits[0]);
      may_be_anything(shared[i].groups[x.present], (fragments - x.present) * sizeof shared[i].groups[0]);
    }
  }
#pragma unroll
  for (u32 i = 0; i < many_stages - 1; i++) {
    if (i < parts) copies.bring(i, count_of(i), shared[i]);
    end_of_copies();
  }
#pragma unroll
  for (u32 f = 0; f < fragments; f++)
#pragma unroll
    for (u32 i = 0; i < 4; i++) totals.of[f][i] = 0.0f;
  u32 stage = 0;
#pragma unroll 1
  for (u32 part = 0; part < parts; part++) {
    wait_for_copies<many_stages - 2>();
    show_copies();
    __syncthreads();  // all copies of this part are there, and nobody reads the one before
    const u32 coming = part + many_stages - 1;
    if (coming < parts) copies.bring(coming, count_of(coming), shared[(stage + many_stages - 1) % many_stages]);
    end_of_copies();
    const PartOfRows<bits, steps> now = next;
    if (part + 1 < parts) load(part + 1);
    add_part<bits, steps, overlaps>(now, stored, shared[stage], x.present, count_of(part), totals);
    stage = (stage + 1) % many_stages;
  }
}
