// Refused: every argument says what it is.
#include <metal_stdlib>
using namespace metal;

kernel void sample(device float* out, uint i [[thread_position_in_grid]]) { out[i] = 1.0f; }
