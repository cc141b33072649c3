// Refused: there is no double.
#include <metal_stdlib>
using namespace metal;

kernel void sample(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  double value = 1.0f;
  out[i] = float(value);
}
