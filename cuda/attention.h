// How attention adds up chunks of keys, and spans of chunks.
#pragma once

#include "cached.h"

// What follows is added to what came before: both are multiplied so that they are relative to the higher of the two.
struct Joint {
  float before;
  float after;
};
DEV Joint join(float& highest, float& total, float more_highest, float more_total) {
  const float both = fmaxf(highest, more_highest);
  const Joint joint = {expf(highest - both), expf(more_highest - both)};
  highest = both;
  total = fmaf(total, joint.before, more_total * joint.after);
  return joint;
}
DEV float joined(float value, float more, float before, float after) { return fmaf(value, before, more * after); }

// 32 sums over the lanes of a warp, of which lane l gets that of number l. The pairs that are added are a butterfly's.
DEV float sums_of_lanes(float (&x)[lanes]) {
  const u32 lane = lane_of();
#pragma unroll
  for (u32 half = lanes / 2; half > 0; half /= 2) {
    const bool is_upper = lane & half;
#pragma unroll
    for (u32 i = 0; i < lanes / 2; i++) {
      if (i >= half) break;
      const float sent = is_upper ? x[i] : x[i + half], kept = is_upper ? x[i + half] : x[i];
      x[i] = kept + __shfl_xor_sync(everyone, sent, half);
    }
  }
  return x[0];
}

// Where a part of a query is kept: the weighted values, and behind those of all queries the highest score and the sum
// of the weights.
struct PlaceOfPart {
  float* values;
  float* highest;
  float* total;
};
DEV PlaceOfPart place_of_part(const AttentionParams& params, u32 queries, u32 query, u32 part) {
  const u64 place = u64(query) * params.part_count + part, all = u64(queries) * params.part_count;
  float* highest = params.parts + all * params.dim + place * 2;
  return {params.parts + place * params.dim, highest, highest + 1};
}

// Number i of the output of a query (row * heads + head), which may go through a gate.
DEV float gate_of(const AttentionParams& params, u32 query, u32 i) {
  if (!params.gate) return 1.0f;
  const u32 row = query / params.heads, head = query - row * params.heads;
  return sigmoid(params.gate[u64(row) * params.gate_row_stride + u64(head) * params.gate_head_stride + i]);
}
DEV void keep(const AttentionParams& params, u32 query, u32 i, float x) {
  params.out[u64(query) * params.dim + i] = x * gate_of(params, query, i);
}

// Rows of keys and values of which there are kernels that have them in shared memory: their type and width.
#define FOR_COPIED_ROWS(instance)                                                                       \
  instance(f32, float, 128) instance(f32, float, 256) instance(bf16, u16, 128) instance(bf16, u16, 256) \
      instance(codes, signed char, 128) instance(codes, signed char, 256)
