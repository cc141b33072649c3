// Refused: a vector of three has the size of four in a buffer, and packed it has not.
#include <metal_stdlib>
using namespace metal;

kernel void sample(device float3* out [[buffer(0)]], uint i [[thread_position_in_grid]]) { out[i] = out[i + 1]; }
