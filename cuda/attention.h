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

// Number i of the output of a query (row * heads + head), which may go through a gate.
DEV void keep(const AttentionParams& params, u32 query, u32 i, float x) {
  if (params.gate) {
    const u32 row = query / params.heads, head = query - row * params.heads;
    x = x * sigmoid(params.gate[u64(row) * params.gate_row_stride + u64(head) * params.gate_head_stride + i]);
  }
  params.out[u64(query) * params.dim + i] = x;
}
