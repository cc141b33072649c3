// Refused: threadgroup variables begin without a value.
#include <metal_stdlib>
using namespace metal;

kernel void sample(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup float shared = 1.0f;
  out[i] = shared;
}
