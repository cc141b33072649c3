// Refused: lanes exchange numbers of 32 bits.
#include <metal_stdlib>
using namespace metal;

kernel void sample(device half* out [[buffer(0)]], uint i [[thread_position_in_grid]]) { out[i] = simd_sum(out[i]); }
