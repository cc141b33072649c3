// Tokens that the state of a delta-net does not have yet. From the state that lies in memory, and what they add to it,
// comes what would lie there if each of them had written it, bit for bit.
#pragma once
#include "basics.h"

// Of a head. They lie behind the state of all heads.
DEV PendingTokens& pending_of(float* state, u32 heads, u32 head) {
  return reinterpret_cast<PendingTokens*>(state + u64(heads) * part_columns * part_columns)[head];
}

// Takes a lane's numbers of some rows of the state through `count` tokens, which are at `tokens`. The lane's part of a
// row is `part`, and row r is first + r * apart.
template <u32 rows, u32 quads>
DEV void take_pending(float4 (&held)[rows][quads], u32 count, const float* decays,
                      const float (*tokens)[2][part_columns], u32 part, u32 first, u32 apart) {
#pragma unroll 1
  for (u32 token = 0; token < count; token++) {
    const float decay = decays[token];
    const float4* key = reinterpret_cast<const float4*>(tokens[token][0]);
    float corrections[rows];
#pragma unroll
    for (u32 r = 0; r < rows; r++) corrections[r] = tokens[token][1][first + r * apart];
#pragma unroll
    for (u32 c = 0; c < quads; c++) {
      const float4 numbers = key[c * delta_lanes + part];
#pragma unroll
      for (u32 r = 0; r < rows; r++) {
        float4& now = held[r][c];
        now.x = fmaf(corrections[r], numbers.x, now.x * decay), now.y = fmaf(corrections[r], numbers.y, now.y * decay);
        now.z = fmaf(corrections[r], numbers.z, now.z * decay), now.w = fmaf(corrections[r], numbers.w, now.w * decay);
      }
    }
  }
}
