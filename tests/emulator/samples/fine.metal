// Correct, but only just: the checker must be silent about all of it, in every order.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

kernel void exchange_in_a_simdgroup(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float shared[64];
  shared[i] = float(i);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = shared[i ^ 5];
}

kernel void exchange_in_device_memory(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  out[i] = float(i);
  threadgroup_barrier(mem_flags::mem_device);
  float other = out[63 - i];
  threadgroup_barrier(mem_flags::mem_device);
  out[i] = other;
}

kernel void both_kinds_of_memory(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float shared[64];
  shared[i] = 1.0f;
  out[i] = 2.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  float sum = shared[63 - i] + out[63 - i];
  threadgroup_barrier(mem_flags::mem_device);
  out[i] = sum;
}

kernel void halves_side_by_side(device half* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i] = half(i);
}

kernel void bytes_side_by_side(device uchar* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i] = uchar(i);
}

kernel void counted(device atomic_uint* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  atomic_fetch_add_explicit(out, i, memory_order_relaxed);
}

// The number of rounds differs from one simdgroup to the other.
kernel void rounds_by_simdgroup(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]],
                                uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float parts[2];
  float sum = 0.0f;
  for (uint round = 0; round < 3 + simdgroup; round++) sum += simd_sum(float(i + round));
  if (i % 32 == 0) parts[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = parts[0] + parts[1];
}

// The sum needs every lane's value, so every lane has read before the one lane writes.
kernel void written_after_a_sum(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float shared[64];
  shared[i] = float(i);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  float sum = simd_sum(shared[i ^ 1]);
  if (i % 32 == 0) shared[i] = sum;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = shared[i & ~31u];
}

kernel void scratch_used_twice(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float shared[1];
  for (uint round = 0; round < 2; round++) {
    if (i == 0) shared[0] = float(round);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i * 2 + round] = shared[0];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// Threadgroup memory is new for every threadgroup.
kernel void the_last_element(device const uchar* x [[buffer(0)]], device uchar* out [[buffer(1)]],
                             constant uint& count [[buffer(2)]], uint i [[thread_position_in_grid]],
                             uint lane [[thread_index_in_threadgroup]]) {
  threadgroup uchar shared[64];
  shared[lane] = i < count ? x[i] : uchar(0);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i < count) out[i] = shared[lane];
}
