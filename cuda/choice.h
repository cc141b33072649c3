// Who comes before whom, and the choice of a token's experts where they are few.
#pragma once
#include "basics.h"

// A candidate as one number: whoever comes before another has the greater one. 0 is nobody.
DEV u64 candidate(float value, u32 id) {
  const u32 bits = __float_as_uint(value + 0.0f);  // there is one zero
  const u32 ordered = is_nan(value) ? 0u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return u64(ordered) << 32 | ~id;
}
DEV u32 id_of(u64 key) { return ~u32(key); }
DEV float value_of(u64 key) {
  const u32 ordered = u32(key >> 32);
  if (ordered == 0) return __uint_as_float(0x7fc00000u);
  return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

// The weights of those that were chosen, in shared memory, to where they belong: divided by their sum, if that is asked
// for and the sum is above 0, and multiplied by the scaling. A warp does it together.
DEV void finish_weights(const RouteParams& params, const float* chosen, float* weights) {
  __syncwarp();
  float total = 0.0f;
  for (u32 i = 0; i < params.k; i++) total += chosen[i];
  const float divisor = params.normalize && total > 0.0f ? total : 1.0f;
  for (u32 i = lane_of(); i < params.k; i += lanes) weights[i] = chosen[i] / divisor * params.scaling;
}

// Of few experts without groups, in registers: lane l has those of l, l + 32 ... A number in the order of the logits
// stands for each, 1 for NaN, and 0 for one that was taken. A warp does it together; `ids` and `values` are shared
// memory: the experts, best first, and their logits.
struct FewLogits {
  float of[few_experts / lanes];

  DEV void load(const float* logits, u32 experts) {
#pragma unroll
    for (u32 j = 0; j < few_experts / lanes; j++) of[j] = logits[min(lane_of() + j * lanes, experts - 1)];
  }
};
DEV void choose_of_few(const FewLogits& logits, u32 experts, u32 k, int* ids, float* values) {
  constexpr u32 most = few_experts / lanes;
  const u32 lane = lane_of();
  u32 keys[most], best = 0, own = 0;  // the lane's best, and which of its experts that is
#pragma unroll
  for (u32 j = most; j-- > 0;) {
    keys[j] = lane + j * lanes < experts ? max(u32(candidate(logits.of[j], 0) >> 32), 1u) : 0u;
    if (keys[j] >= best) best = keys[j], own = j;
  }
#pragma unroll 1
  for (u32 place = 0; place < k; place++) {
    bool is_chosen = best == warp_max(best);
    const u32 id = lane + own * lanes;
    if (count_bits(__ballot_sync(everyone, is_chosen)) > 1) {  // of the same logits the first
      const u32 first = warp_min(is_chosen ? id : few_experts);
      is_chosen = is_chosen && id == first;
    }
    if (is_chosen) {
      ids[place] = int(id), values[place] = value_of(u64(best == 1 ? 0 : best) << 32);
      const u32 taken = own;
      best = 0;
#pragma unroll
      for (u32 j = most; j-- > 0;) {
        if (j == taken) keys[j] = 0;
        if (keys[j] >= best) best = keys[j], own = j;
      }
    }
  }
  __syncwarp();
}

// What was chosen, to where it belongs: the probabilities among all take the place of the logits in `values`. A warp
// does it together.
DEV void keep_choice(const RouteParams& params, const FewLogits& logits, const int* ids, float* values, int* to,
                     float* weights) {
  const float highest = values[0];
  float total = 0.0f;
#pragma unroll
  for (u32 j = 0; j < few_experts / lanes; j++)
    if (lane_of() + j * lanes < params.experts) total += expf(logits.of[j] - highest);
  total = warp_sum(total);
  __syncwarp();
  for (u32 i = lane_of(); i < params.k; i += lanes) values[i] = expf(values[i] - highest) / total;
  finish_weights(params, values, weights);
  for (u32 i = lane_of(); i < params.k; i += lanes) {
    to[i] = ids[i];
    if (params.factors) weights[i] *= params.factors[ids[i]];
  }
}
