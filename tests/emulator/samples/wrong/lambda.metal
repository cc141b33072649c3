// Refused: there are no lambdas.
#include <metal_stdlib>
using namespace metal;

kernel void sample(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  auto twice = [](float x) { return 2.0f * x; };
  out[i] = twice(out[i]);
}
