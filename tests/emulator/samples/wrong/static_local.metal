// Refused: no local variable is static.
#include <metal_stdlib>
using namespace metal;

kernel void sample(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  static float kept;
  kept += 1.0f;
  out[i] = kept;
}
