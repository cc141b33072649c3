// Refused: no pointer goes from one address space to another.
#include <metal_stdlib>
using namespace metal;

kernel void sample(device float* out [[buffer(0)]], constant float* x [[buffer(1)]],
                   uint i [[thread_position_in_grid]]) {
  device const float* other = x;
  out[i] = other[i];
}
