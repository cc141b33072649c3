// Products of one or two rows of x with a stage of a tile. Bit for bit as those of copied.h.
#pragma once
#include "streamed.h"

constexpr u32 part_groups = part_steps / copied_steps;
constexpr u32 digit_bytes = 4 * 16;                              // of a digit of a group of a row of x
constexpr u32 row_digit_bytes = digits_of_number * digit_bytes;  // of its group
constexpr u32 group_digit_bytes = two_rows * row_digit_bytes;
constexpr u32 part_group_bytes = part_groups * sizeof(DigitGroup);  // of a row
static_assert(part_groups * group_digit_bytes + two_rows * part_group_bytes == entry_part_bytes, "room for digits");

// The digits of one or two rows in shared memory: of each group of the columns those of the first row, then those of
// the second, sixteen bytes for each of four lanes: its two packs, in the order in which products take them. Behind
// them are the groups of each part, of the first row and of the second.
struct TwoRowsOfX {
  u8* digits;
  u8* groups;

  DEV TwoRowsOfX(u8* room, u32 parts) : digits(room), groups(room + parts * part_groups * group_digit_bytes) {}

  // Of row `row`, of whose span of 256 columns from column `first` on the lane has a pack. By a warp.
  template <u32 bits>
  DEV void keep(u32 row, u32 first, u32 columns, const float (&numbers)[pack]) const {
    constexpr u32 group_packs = copied_steps * 4;
    DigitGroup made_group;
    const Digits made = digits_of(numbers, copied_steps, made_group);
    const u32 index = first / pack + lane_of(), group = index / group_packs, within = index % group_packs;
    if (index * pack >= columns) return;
    u8* to = digits + group * group_digit_bytes + row * row_digit_bytes + within / 2 * 16;
#pragma unroll
    for (u32 d = 0; d < digits_of_number; d++) {
      u32* words = reinterpret_cast<u32*>(to + d * digit_bytes) + within % 2 * (bits == 4 ? 1 : 2);
      words[0] = made.of[d].x, words[bits == 4 ? 2 : 1] = made.of[d].y;
    }
    if (within == 0)
      *reinterpret_cast<DigitGroup*>(groups + (group / part_groups * two_rows + row) * part_group_bytes +
                                     group % part_groups * sizeof(DigitGroup)) = made_group;
  }
};

// What a lane reads of x. The tensor core's product has one group of the columns at a time: its columns 0 to 2 have the
// digits of the first row, 4 to 6 those of the second. So of lanes 4 g ... 4 g + 3 two have the sums of one row, two
// those of the other. What columns 3 and 7 have is not looked at.
struct LaneOfX {
  const u8* digits;
  const u8* groups;

  DEV LaneOfX(const TwoRowsOfX& x, u32 count) {
    const u32 g = lane_of() / 4, t = lane_of() % 4;
    const bool are_two = count > 1;
    digits =
        x.digits + (are_two ? g / 4 * row_digit_bytes : 0) + min(g % 4, digits_of_number - 1) * digit_bytes + t * 16;
    groups = x.groups + (are_two ? t / 2 * part_group_bytes : 0);
  }
  DEV void go_on() { digits += part_groups * group_digit_bytes, groups += two_rows * part_group_bytes; }
};

// Codes of two packs of a lane, as they are stored.
template <u32 bits>
struct TwoPacks {
  typedef uint2 Words;
};
template <>
struct TwoPacks<8> {
  typedef uint4 Words;
};

// The digits of the first of two packs, and of the second. A product takes those of the even columns of both packs, or
// of 8 bits all of one pack, from registers that are side by side, so they lie like that.
template <u32 bits>
DEV uint2 first_of(const uint4& x) {
  return bits == 4 ? make_uint2(x.x, x.z) : make_uint2(x.x, x.y);
}
template <u32 bits>
DEV uint2 second_of(const uint4& x) {
  return bits == 4 ? make_uint2(x.y, x.w) : make_uint2(x.z, x.w);
}

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

// Of the sums that the lanes of a quad have of rows g and g + 8, each of two lanes keeps a row and sends what is the
// other's: as in parts_of_tile.
template <u32 bits>
DEV float total_of_row(const int (&c)[4]) {
  const bool is_second = lane_of() & 1;
  const int s01 = c[1] * 256 + c[0], other_s01 = c[3] * 256 + c[2];
  const int got = __shfl_xor_sync(everyone, is_second ? c[0] : other_s01, 1);
  return fmaf(float(is_second ? c[2] : got), 65536.0f, float(is_second ? got : s01)) * (1.0f / times_too_large<bits>);
}

// Where a lane finds its codes in a stage, and its scales: even lanes have row g, odd ones row g + 8.
template <u32 bits>
struct LaneOfStage {
  u32 codes, scales;

  DEV LaneOfStage() {
    const u32 g = lane_of() / 4, t = lane_of() % 4;
    codes = made_once(g * stage_row_bytes + (bits == 4 ? turn_of<bits>(g) * 16 + t * 8 : (turn_of<bits>(g) ^ t) * 16));
    scales = made_once(scales_of(g + t % 2 * 8));
  }
};

// Part `p` of a stage, whose scales and biases are given as they are stored. Lanes 0 and 1 of four have the first row
// of x.
template <u32 bits, bool is_bf16>
DEV float part_of_two(const u8* codes, u32 p, const LaneOfStage<bits>& lane, u32 scale, u32 bias, const LaneOfX& x) {
  typedef typename TwoPacks<bits>::Words Words;
  const float4 both = *reinterpret_cast<const float4*>(x.groups);
  const DigitGroup groups[part_groups] = {{both.x, both.y}, {both.z, both.w}};
  float part = 0.0f;
#pragma unroll
  for (u32 i = 0; i < part_groups; i++) {
    const u8* at = codes + (lane.codes ^ (p * part_groups + i) * (pack * bits));
    const Words first = *reinterpret_cast<const Words*>(at),
                second = *reinterpret_cast<const Words*>(at + tile_rows / 2 * stage_row_bytes);
    const uint4 digits = *reinterpret_cast<const uint4*>(x.digits + i * group_digit_bytes);
    int c[4];
    sums_of_group<bits>(first, second, first_of<bits>(digits), second_of<bits>(digits), c);
    const u16 own_scale = u16(scale >> (16 * i)), own_bias = u16(bias >> (16 * i));
    const Scaling by = is_bf16 ? Scaling{bf16(own_scale), bf16(own_bias)} : Scaling{f16(own_scale), f16(own_bias)};
    part = with_group(part, total_of_row<bits>(c), by, groups[i]);
  }
  return part;
}
