// Refused: nor the other way.
#include <metal_stdlib>
using namespace metal;

kernel void sample(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                   uint i [[thread_position_in_grid]]) {
  threadgroup const float* other = x;
  out[i] = *other;
}
