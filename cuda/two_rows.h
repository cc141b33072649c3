// Products of one or two rows of x with tiles that lie in shared memory. Bit for bit as those of copied.h, of which the
// tiles, and what a warp has of the columns, are.
#pragma once
#include "copied.h"

constexpr u32 part_groups = part_steps / copied_steps;
constexpr u32 two_segments = copied_parts * part_groups;  // groups of the columns that a warp has

// What a lane needs of a part of x. The tensor core's product has one group of the columns at a time: its columns 0 to
// 2 have the digits of the first row, 4 to 6 those of the second. So of lanes 4 g ... 4 g + 3 two have the sums of one
// row, two those of the other.
struct TwoRowsPart {
  uint2 digits[part_steps];        // of a group, lane t has packs 2 t and 2 t + 1
  DigitGroup groups[part_groups];  // of the lane's row of x
};

// Row `row` of the two: both parts, whose packs the halves of the warp bring.
DEV void make_row_of_two(const float (&numbers)[pack], DigitStage& stage, u32 row, TwoRowsPart (&x)[copied_parts]) {
  constexpr u32 group_packs = copied_steps * 4;
  const u32 g = lane_of() / 4, t = lane_of() % 4, digit = g % 4;
  const DigitGroup group = stage_digits(numbers, stage);
  const bool has_digits = digit < digits_of_number && g / 4 == row, has_groups = t / 2 == row;
#pragma unroll
  for (u32 p = 0; p < copied_parts; p++) {
    const u32 first = p * (lanes / 2);
#pragma unroll
    for (u32 j = 0; j < part_steps; j++)
      if (has_digits)
        x[p].digits[j] = stage[digit][first + j / copied_steps * group_packs + t * copied_steps + j % copied_steps];
#pragma unroll
    for (u32 i = 0; i < part_groups; i++) {
      const float unit = __shfl_sync(everyone, group.unit, first + i * group_packs),
                  sum = __shfl_sync(everyone, group.sum, first + i * group_packs);
      if (has_groups) x[p].groups[i] = {unit, sum};
    }
  }
}

// Codes of two packs of a lane, as they are stored.
template <u32 bits>
struct TwoPacks {
  typedef uint2 Words;
};
template <>
struct TwoPacks<8> {
  typedef uint4 Words;
};
DEV uint2 one_of(bool is_first, const uint2& a, const uint2& b) {
  return make_uint2(is_first ? a.x : b.x, is_first ? a.y : b.y);
}
DEV uint4 one_of(bool is_first, const uint4& a, const uint4& b) {
  return make_uint4(is_first ? a.x : b.x, is_first ? a.y : b.y, is_first ? a.z : b.z, is_first ? a.w : b.w);
}

// As LaneOfTile. Rows of a tile are a multiple of all banks apart, so a lane begins with another group of the columns
// than those whose rows lie before and behind.
template <u32 bits>
struct LaneOfTwo {
  u32 codes[two_segments];  // in the order in which the lane takes them
  u32 to_second_row;
  u32 scale, to_bias, to_second_scale;
  u32 sum;
  u32 has_sum, has_second;

  DEV LaneOfTwo(const TileShape& shape, u32 first_part, u32 all_parts, u32 apart) {
    const u32 g = lane_of() / 4, t = lane_of() % 4, first = min(first_part, all_parts - 1);
    const bool are_two = first_part + 1 < all_parts;
#pragma unroll
    for (u32 i = 0; i < two_segments; i++) {
      const u32 segment = (i + g) % two_segments, part = are_two ? first + segment / part_groups : first;
      const u32 column = part * part_columns + segment % part_groups * (part_columns / part_groups);
      codes[i] = made_once(g * shape.row_bytes + (column + t * copied_steps * pack) / 8 * bits);
    }
    to_second_row = made_once(apart * shape.row_bytes);
    scale = made_once((g + t % 2 * apart) * shape.scale_bytes + first * 4);
    to_bias = made_once(shape.rows * shape.scale_bytes);
    to_second_scale = made_once(are_two ? 4 : 0);
    sum = made_once((first * two_rows + t / 2) * tile_rows + g + t % 2 * 8);
    has_sum = made_once(first_part < all_parts);
    has_second = made_once(are_two);
  }
};

// As sums_of_part, of a group.
template <u32 bits, class Words>
DEV void sums_of_group(const Words& first, const Words& second, const uint2& x0, const uint2& x1, int (&sums)[4]) {
  int odd[4] = {};
#pragma unroll
  for (u32 i = 0; i < 4; i++) sums[i] = 0;
  if constexpr (bits == 4) {
    const auto low = [](u32 codes) { return codes & 0x0f0f0f0fu; };
    const auto high = [](u32 codes) { return codes & 0xf0f0f0f0u; };
    multiply_bytes(sums, low(first.x), low(second.x), low(first.y), low(second.y), x0.x, x1.x);
    multiply_bytes(odd, high(first.x), high(second.x), high(first.y), high(second.y), x0.y, x1.y);
  } else {
    const auto evens = [](u32 a, u32 b) { return __byte_perm(a, b, 0x6420); };
    const auto odds = [](u32 a, u32 b) { return __byte_perm(a, b, 0x7531); };
    multiply_bytes(sums, evens(first.x, first.y), evens(second.x, second.y), odds(first.x, first.y),
                   odds(second.x, second.y), x0.x, x0.y);
    multiply_bytes(odd, evens(first.z, first.w), evens(second.z, second.w), odds(first.z, first.w),
                   odds(second.z, second.w), x1.x, x1.y);
  }
#pragma unroll
  for (u32 i = 0; i < 4; i++) sums[i] = sums[i] * int(times_too_large<bits>) + odd[i];
}

// The warp's parts of the rows of a tile, whose first code and first scale are given, to `parts`: [part][row of
// x][row of the tile].
template <u32 bits>
DEV void parts_of_two(const u8* tile, const u8* scales, const LaneOfTwo<bits>& at, u32 number,
                      const TwoRowsPart (&x)[copied_parts], float* parts) {
  typedef typename TwoPacks<bits>::Words Words;
  const bool is_second = lane_of() & 1, is_one_on = lane_of() / 4 & 1, is_two_on = lane_of() / 4 & 2;
  Words codes[2][two_segments];
  u32 stored[copied_parts][2];
#pragma unroll
  for (u32 i = 0; i < 2; i++)
#pragma unroll
    for (u32 j = 0; j < two_segments; j++)
      codes[i][j] = *reinterpret_cast<const Words*>(tile + at.codes[j] + i * at.to_second_row);
#pragma unroll
  for (u32 p = 0; p < copied_parts; p++)
#pragma unroll
    for (u32 i = 0; i < 2; i++)
      stored[p][i] = *reinterpret_cast<const u32*>(scales + at.scale + i * at.to_bias + p * at.to_second_scale);
#pragma unroll
  for (u32 i = 0; i < 2; i++) {  // in the order of the columns
    static_assert(two_segments == 4, "two turns");
    Words turned[two_segments];
#pragma unroll
    for (u32 j = 0; j < two_segments; j++) turned[j] = one_of(is_one_on, codes[i][(j + 3) % two_segments], codes[i][j]);
#pragma unroll
    for (u32 j = 0; j < two_segments; j++) codes[i][j] = one_of(is_two_on, turned[(j + 2) % two_segments], turned[j]);
  }
  const bool is_bf16 = number == number_bf16;
  float out[copied_parts];
#pragma unroll
  for (u32 p = 0; p < copied_parts; p++) {
    out[p] = 0.0f;
#pragma unroll
    for (u32 group = 0; group < part_groups; group++) {
      const u32 segment = p * part_groups + group;
      int c[4];
      sums_of_group<bits>(codes[0][segment], codes[1][segment], x[p].digits[copied_steps * group],
                          x[p].digits[copied_steps * group + 1], c);
      // As in parts_of_tile: each of two lanes keeps a row of the tile.
      const int s01 = c[1] * 256 + c[0], other_s01 = c[3] * 256 + c[2];
      const int got = __shfl_xor_sync(everyone, is_second ? c[0] : other_s01, 1);
      const float total =
          fmaf(float(is_second ? c[2] : got), 65536.0f, float(is_second ? got : s01)) * (1.0f / times_too_large<bits>);
      const u16 scale = u16(stored[p][0] >> (16 * group)), bias = u16(stored[p][1] >> (16 * group));
      const Scaling by = is_bf16 ? Scaling{bf16(scale), bf16(bias)} : Scaling{f16(scale), f16(bias)};
      out[p] = with_group(out[p], total, by, x[p].groups[group]);
    }
  }
  if (at.has_sum) parts[at.sum] = out[0];
  if (at.has_second) parts[at.sum + two_rows * tile_rows] = out[1];
}

// The lane's sum of parts, in their order: lane l has row l / 16 of x and row l % 16 of the tile.
DEV float sum_of_two(const float* parts, u32 count) {
  constexpr u32 together = 4;  // that are loaded before any is added
  float total = 0.0f;
  u32 part = 0;
#pragma unroll 1
  for (; part + together <= count; part += together) {
    float some[together];
#pragma unroll
    for (u32 j = 0; j < together; j++) some[j] = parts[(part + j) * (two_rows * tile_rows) + lane_of()];
#pragma unroll
    for (u32 j = 0; j < together; j++) total += some[j];
  }
#pragma unroll 1
  for (; part < count; part++) total += parts[part * (two_rows * tile_rows) + lane_of()];
  return total;
}
