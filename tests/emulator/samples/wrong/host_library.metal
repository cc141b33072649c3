// Refused: std is not there.
#include <metal_stdlib>
using namespace metal;

kernel void sample(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) { out[i] = std::max(out[i], 0.0f); }
