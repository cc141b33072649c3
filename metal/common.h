// What every kernel file begins with.
#pragma once
#include <metal_stdlib>
using namespace metal;

#include "params.h"

// Two instances of one template must round alike, or a row would depend on its neighbours. So only what says fma is
// fused.
#pragma clang fp contract(off)

// Names a pipeline. The arguments are those of the template.
#define instantiate_kernel(name, function, ...) \
  template [[host_name(name)]] kernel decltype(function<__VA_ARGS__>) function<__VA_ARGS__>;

inline float sigmoid(float x) { return 1.0f / (1.0f + precise::exp(-x)); }
inline float silu(float x) { return x * sigmoid(x); }
// gelu(x) = x / 2 * (1 + tanh(y)) = x * sigmoid(2 y), y being sqrt(2 / pi) * (x + 0.044715 x^3).
inline float gelu(float x) { return x * sigmoid(x * (1.5957691216f + 0.0713548163f * (x * x))); }
// Comparisons leave NaN what it is, and min and max do not.
inline float clamped_swiglu(float gate, float up, float alpha, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up;
  up = up < -limit ? -limit : up;
  return gate * sigmoid(gate * alpha) * (up + 1.0f);
}

// The sum over a threadgroup of whole simdgroups, the same in every thread. `scratch` has room for max_simdgroups; it
// may be used again only after a barrier that follows the call.
inline float threadgroup_sum(float value, threadgroup float* scratch, uint lane, uint simdgroup, uint simdgroups) {
  value = simd_sum(value);
  if (lane == 0) scratch[simdgroup] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < simdgroups ? scratch[lane] : 0.0f);
}
