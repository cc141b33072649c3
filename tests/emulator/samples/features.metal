// What kernels lean on, once each, to be compared with NumPy.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

struct Shape {
  uint rows, columns;
};

// [rows, columns] of T, transposed through threadgroup memory; two axes, and a template.
template <typename T, int tile>
kernel void transposed(device const T* x [[buffer(0)]], device T* out [[buffer(1)]],
                       constant Shape& shape [[buffer(2)]], uint2 group [[threadgroup_position_in_grid]],
                       uint2 at [[thread_position_in_threadgroup]]) {
  threadgroup T block[tile][tile + 1];
  uint row = group.y * tile + at.y, column = group.x * tile + at.x;
  if (row < shape.rows && column < shape.columns) block[at.y][at.x] = x[row * shape.columns + column];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  row = group.x * tile + at.y, column = group.y * tile + at.x;
  if (row < shape.columns && column < shape.rows) out[row * shape.rows + column] = block[at.x][at.y];
}
template [[host_name("transposed_float")]] kernel decltype(transposed<float, 8>) transposed<float, 8>;
template [[host_name("transposed_half")]] kernel decltype(transposed<half, 16>) transposed<half, 16>;

kernel void rounded(device const float* x [[buffer(0)]], device bfloat* to_bfloat [[buffer(1)]],
                    device half* to_half [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  to_bfloat[i] = bfloat(x[i]);
  to_half[i] = half(x[i]);
}

kernel void lanes(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                  uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                  uint count [[threads_per_grid]]) {
  float value = x[i];
  out[i] = simd_sum(value);
  out[count + i] = simd_max(value);
  out[2 * count + i] = simd_min(value);
  out[3 * count + i] = simd_shuffle_xor(value, 3);
  out[4 * count + i] = simd_shuffle_down(value, 2);
  out[5 * count + i] = simd_broadcast(value, 7);
  out[6 * count + i] = simd_prefix_exclusive_sum(value);
  out[7 * count + i] = float(popcount(uint((simd_vote::vote_t)simd_ballot(value > 0.0f))) + lane * 0);
}

// Lanes meet those that wait at the same call, and at the same depth of the stack.
kernel void at_two_calls(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i] = i % 32 < 8 ? simd_sum(1.0f) : simd_max(float(i % 32));
}
__attribute__((noinline)) float summed(float x) { return simd_sum(x); }
__attribute__((noinline)) float summed_deeper(float x) { return summed(x) + 0.5f; }
kernel void at_two_depths(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i] = i % 32 < 8 ? summed(1.0f) : summed_deeper(1.0f);
}

// out = x . y by 8 x 8 tiles.
kernel void multiplied(device const float* x [[buffer(0)]], device const float* y [[buffer(1)]],
                       device float* out [[buffer(2)]], constant uint& width [[buffer(3)]],
                       uint2 group [[threadgroup_position_in_grid]]) {
  simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (uint k = 0; k < width; k += 8) {
    simdgroup_float8x8 a, b;
    simdgroup_load(a, x + group.y * 8 * width + k, width);
    simdgroup_load(b, y + k * width + group.x * 8, width);
    simdgroup_multiply_accumulate(sum, a, b, sum);
  }
  simdgroup_store(sum, out + group.y * 8 * width + group.x * 8, width);
}

kernel void vectors(device const float4* x [[buffer(0)]], device float4* out [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) {
  float4 value = x[i];
  value.xy = value.yx;
  value = float4(value.xy, dot(value, value), as_type<float>(as_type<uint>(value.w) ^ 0x80000000u));
  out[i] = clamp(value, float4(-1.0f), float4(1.0f)).wzyx;
}

kernel void functions(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                      uint i [[thread_position_in_grid]], uint count [[threads_per_grid]]) {
  out[i] = precise::exp(x[i]);
  out[count + i] = precise::log(fabs(x[i]));
  out[2 * count + i] = precise::rsqrt(fabs(x[i]));
  out[3 * count + i] = precise::tanh(x[i]);
  out[4 * count + i] = fma(x[i], x[i], 1.0f);
}
