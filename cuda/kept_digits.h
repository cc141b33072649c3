// Digits of rows, by whoever makes these rows.
#pragma once
#include "copied.h"

// A lane's pack of a row, as digits_of has it, to its place: as make_digits has it.
DEV void keep_digits(const DigitRoom& to, u32 columns, u32 row, u32 index, const Digits& made,
                     const DigitGroup& group) {
  const PackPlace place = place_of_pack(index, copied_steps);
  const u32 fragment = row / fragment_rows, own = row % fragment_rows, steps = columns / step_columns;
#pragma unroll
  for (u32 d = 0; d < digits_of_number; d++) {
    uint2* at = reinterpret_cast<uint2*>(to.digits) + digits_at(fragment, steps, place.step, d);
    if (to.in_halves) {
      u32* half = reinterpret_cast<u32*>(at) + own * 4 + place.lane;
      half[0] = made.of[d].x, half[fragment_rows * 4] = made.of[d].y;
    } else {
      at[own * 4 + place.lane] = made.of[d];
    }
  }
  if (place.lane == 0 && place.step % copied_steps == 0)
    to.groups[(u64(fragment) * (steps / copied_steps) + place.step / copied_steps) * fragment_rows + own] = group;
}

// Those of a group of a row, whose numbers are given, from column `begin` on. By a warp.
DEV void keep_group(const DigitRoom& to, u32 columns, u32 row, u32 begin, const float* numbers) {
  constexpr u32 packs = copied_steps * step_columns / pack;
  const u32 index = lane_of() % packs;
  float own[pack];
  pack_of_x(numbers, index * pack, packs * pack, own);
  DigitGroup group;
  const Digits made = digits_of(own, copied_steps, group);
  if (lane_of() < packs) keep_digits(to, columns, row, begin / pack + index, made, group);
}
