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
  u32 keys[most];
#pragma unroll
  for (u32 j = 0; j < most; j++)
    keys[j] = lane + j * lanes < experts ? max(u32(candidate(logits.of[j], 0) >> 32), 1u) : 0u;
#pragma unroll 1
  for (u32 place = 0; place < k; place++) {
    u32 best = 0, id = few_experts;
#pragma unroll
    for (u32 j = 0; j < most; j++) best = max(best, keys[j]);
    best = warp_max(best);
#pragma unroll
    for (u32 j = most; j-- > 0;)
      if (keys[j] == best) id = lane + j * lanes;
    id = warp_min(id);
#pragma unroll
    for (u32 j = 0; j < most; j++)
      if (id == lane + j * lanes) keys[j] = 0;
    if (lane == 0) ids[place] = int(id), values[place] = value_of(u64(best == 1 ? 0 : best) << 32);
  }
  __syncwarp();
}

// The same by all threads of a block, which then know it. First each warp finds the best of `lanes` experts, then all
// of them the best of these: a place is how many come before it.
struct BestOfLanes {
  u32 keys[few_experts];
  int ids[few_experts];
};
DEV void choose_together(const float* logits, u32 experts, u32 k, BestOfLanes& best, int* ids, float* values) {
  const u32 lane = lane_of(), count = (experts + lanes - 1) / lanes * k;
#pragma unroll 1
  for (u32 first = warp_of() * lanes; first < experts; first += blockDim.x) {
    const u32 id = first + lane;
    const u32 key = id < experts ? max(u32(candidate(logits[id], 0) >> 32), 1u) : 0u;
    u32 place = count_bits(warp_peers(key) & ((1u << lane) - 1));
#pragma unroll
    for (u32 other = 0; other < lanes; other++) place += __shfl_sync(everyone, key, other) > key ? 1 : 0;
    if (place < k) best.keys[first / lanes * k + place] = key, best.ids[first / lanes * k + place] = int(id);
  }
  __syncthreads();
  constexpr u32 each = 4;  // threads of a key
#pragma unroll 1
  for (u32 base = 0; base < count; base += blockDim.x / each) {
    const u32 own = min(base + threadIdx.x / each, count - 1), key = best.keys[own];
    u32 place = 0;
#pragma unroll 4
    for (u32 other = threadIdx.x % each; other < count; other += each)
      place += best.keys[other] > key || (best.keys[other] == key && other < own) ? 1 : 0;
    place += __shfl_xor_sync(everyone, place, 1);
    place += __shfl_xor_sync(everyone, place, 2);
    if (place < k) ids[place] = best.ids[own], values[place] = value_of(u64(key == 1 ? 0 : key) << 32);
  }
  __syncthreads();
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
