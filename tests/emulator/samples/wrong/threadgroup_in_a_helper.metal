// Refused: threadgroup variables belong to kernels.
#include <metal_stdlib>
using namespace metal;

inline float shared_sum(float x) {
  threadgroup float shared[32];
  shared[0] = x;
  return shared[0];
}
kernel void sample(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) { out[i] = shared_sum(1.0f); }
