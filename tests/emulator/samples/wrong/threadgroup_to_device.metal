// Refused: a function that takes device memory does not take threadgroup memory.
#include <metal_stdlib>
using namespace metal;

inline float first(device const float* x) { return x[0]; }
kernel void sample(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float shared[4];
  shared[i & 3] = 1.0f;
  out[i] = first(shared);
}
