// Refused: a literal without f is a double to some compilers.
#include <metal_stdlib>
using namespace metal;

kernel void sample(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) { out[i] = 1.5; }
