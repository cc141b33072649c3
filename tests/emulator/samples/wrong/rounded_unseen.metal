// Refused: what loses bits is written out.
#include <metal_stdlib>
using namespace metal;

kernel void sample(device half* out [[buffer(0)]], device const float* x [[buffer(1)]],
                   uint i [[thread_position_in_grid]]) {
  out[i] = x[i];
}
