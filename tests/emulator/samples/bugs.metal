// One bug a kernel. The checker must find every one of them.
#include <metal_stdlib>
using namespace metal;

kernel void missing_barrier(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float shared[64];
  shared[i] = float(i);
  out[i] = shared[63 - i];
}

kernel void barrier_for_other_memory(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  out[i] = float(i);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float other = out[63 - i];
  threadgroup_barrier(mem_flags::mem_device);
  out[i] = other + 1.0f;
}

kernel void missing_simdgroup_barrier(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float shared[64];
  shared[i] = float(i);
  float total = simd_sum(1.0f);
  out[i] = shared[i ^ 5] + total;
}

// A scratch that is written again while another simdgroup may still read it.
kernel void scratch_written_too_early(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float shared[1];
  for (uint round = 0; round < 2; round++) {
    if (i == 0) shared[0] = float(round);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i * 2 + round] = shared[0];
  }
}

kernel void groups_share_a_place(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i / 2 % 8] += 1.0f;
}

kernel void group_reads_what_another_writes(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i] = out[(i + 64) % 128];
}

kernel void atomic_and_plain(device atomic_uint* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  if (i == 0) *(device uint*)out = 1;
  if (i != 0) atomic_fetch_add_explicit(out, 1u, memory_order_relaxed);
}

kernel void read_past_the_end(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                              uint i [[thread_position_in_grid]]) {
  out[i] = x[i + 1];
}

kernel void write_before_the_beginning(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[int(i) - 1] = 1.0f;
}

kernel void threadgroup_out_of_bounds(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float shared[32];
  shared[i] = 1.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = shared[i];
}

kernel void uninitialised(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float shared[64];
  if (i < 32) shared[i] = 1.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = shared[i];
}

kernel void added_to_uninitialised(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float shared[64];
  shared[i] += 1.0f;
  out[i] = shared[i];
}

kernel void returned_before_the_barrier(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i >= 40) return;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = 1.0f;
}

kernel void different_barriers(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i < 32) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = 1.0f;
  } else {
    threadgroup_barrier(mem_flags::mem_device);
    out[i] = 2.0f;
  }
}

kernel void shuffled_from_an_inactive_lane(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  float value = float(i);
  if (i % 32 < 16) value = simd_shuffle_xor(value, 16);
  out[i] = value;
}

kernel void sum_under_a_lane_condition(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  float value = float(i);
  if (i % 2 == 0) value = simd_sum(value);
  out[i] = value;
}

kernel void half_at_a_simdgroup_barrier(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i % 32 < 16) simdgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = 1.0f;
}

kernel void not_bound(device float* out [[buffer(0)]], device const float* x [[buffer(3)]],
                      uint i [[thread_position_in_grid]]) {
  out[i] = x[i];
}

kernel void misaligned(device const uchar* x [[buffer(0)]], device float* out [[buffer(1)]],
                       uint i [[thread_position_in_grid]]) {
  out[i] = *(device const float*)(x + i * 4 + 2);
}

kernel void constant_written(device const float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  *(device float*)(x + i) = 1.0f;
}

kernel void arguments_too_short(device float* out [[buffer(0)]], constant uint4& sizes [[buffer(1)]],
                                uint i [[thread_position_in_grid]]) {
  out[i] = float(sizes.x);
}

kernel void too_much_threadgroup_memory(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float shared[8193];
  shared[i] = 1.0f;
  out[i] = shared[i];
}

kernel void copied(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                   uint i [[thread_position_in_grid]]) {
  out[i] = x[i];
}
