// Refused: a pointer names its address space.
#include <metal_stdlib>
using namespace metal;

inline float first(float* x) { return x[0]; }
kernel void sample(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  float values[2] = {1.0f, 2.0f};
  out[i] = first(values);
}
