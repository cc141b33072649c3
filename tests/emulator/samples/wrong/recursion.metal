// Refused: no function calls itself.
#include <metal_stdlib>
using namespace metal;

inline float power(float x, uint n) { return n == 0 ? 1.0f : x * power(x, n - 1); }
kernel void sample(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) { out[i] = power(out[i], i); }
