// The experts that a router chose. However many there are, they take two dispatches: one for gate, up and SwiGLU, and
// one for down.
//
// A block is a few pairs (token * k + place) of one expert. When a single token is computed, each block has one pair.
// In a prefill, a block has up to product_rows pairs. The output of a pair goes to its own row, so the order of the
// blocks changes no bit.
#pragma once
#include "weights.h"

template <int bits>
inline Weights<bits> weights_of(constant ExpertParams& params, device const uchar* expert, ulong weight, ulong scales,
                                ulong biases) {
  return {expert + weight, expert + scales, expert + biases, params.columns, params.group_shift, params.number};
}

// out[p] = silu(gate . x[p / k]) * (up . x[p / k]), or what biases, clamped_swiglu and geglu make of the products.
// Grid of threadgroups: blocks of outputs, blocks of pairs.
template <int bits, int rows>
kernel void expert_gate_up(constant ExpertParams& params [[buffer(0)]], device const ExpertBlock* blocks [[buffer(1)]],
                           device const uint* pairs [[buffer(2)]], device const uchar* slots [[buffer(3)]],
                           device const float* x [[buffer(4)]], device const float* gate_bias [[buffer(5)]],
                           device const float* up_bias [[buffer(6)]], device float* out [[buffer(7)]],
                           uint2 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint first = (group.x * product_simdgroups + simdgroup) * outputs_of_simdgroup;
  if (first >= params.rows) return;
  device const ExpertBlock& block = blocks[group.y];
  device const uchar* expert = slots + block.slot;
  const Weights<bits> gate = weights_of<bits>(params, expert, params.weight, params.scales, params.biases);
  const Weights<bits> up = weights_of<bits>(params, expert, params.up_weight, params.up_scales, params.up_biases);
  device const float* pointers[rows];
  for (int r = 0; r < rows; r++)
    pointers[r] = x + ulong(pairs[block.first + min(uint(r), block.count - 1)] / params.k) * params.columns;
  float gated[rows][outputs_of_simdgroup], raised[rows][outputs_of_simdgroup];
  add_products(gate, first, params.rows - 1, pointers, lane, gated);
  add_products(up, first, params.rows - 1, pointers, lane, raised);
  for (int r = 0; r < rows; r++)
    for (uint o = 0; o < outputs_of_simdgroup; o++) {
      float given = simd_sum(gated[r][o]), beside = simd_sum(raised[r][o]);
      if (params.has_bias != 0) {
        const ulong at = ulong(block.expert) * params.rows + min(first + o, params.rows - 1);
        given += gate_bias[at];
        beside += up_bias[at];
      }
      const float result = params.limit > 0.0f    ? clamped_swiglu(given, beside, params.alpha, params.limit)
                           : params.is_geglu != 0 ? gelu(given) * beside
                                                  : silu(given) * beside;
      if (lane == 0 && uint(r) < block.count && first + o < params.rows)
        out[ulong(pairs[block.first + uint(r)]) * params.rows + first + o] = result;
    }
}

// out[p] = W . x[p / k], and a bias if there is one. This is down with k = 1, and gate or up by itself. The grid is the
// same.
template <int bits, int rows>
kernel void expert_down(constant ExpertParams& params [[buffer(0)]], device const ExpertBlock* blocks [[buffer(1)]],
                        device const uint* pairs [[buffer(2)]], device const uchar* slots [[buffer(3)]],
                        device const float* x [[buffer(4)]], device const float* bias [[buffer(5)]],
                        device float* out [[buffer(6)]], uint2 group [[threadgroup_position_in_grid]],
                        uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint first = (group.x * product_simdgroups + simdgroup) * outputs_of_simdgroup;
  if (first >= params.rows) return;
  device const ExpertBlock& block = blocks[group.y];
  const Weights<bits> down = weights_of<bits>(params, slots + block.slot, params.weight, params.scales, params.biases);
  device const float* pointers[rows];
  for (int r = 0; r < rows; r++)
    pointers[r] = x + ulong(pairs[block.first + min(uint(r), block.count - 1)] / params.k) * params.columns;
  float result[rows][outputs_of_simdgroup];
  add_products(down, first, params.rows - 1, pointers, lane, result);
  for (int r = 0; r < rows; r++)
    for (uint o = 0; o < outputs_of_simdgroup; o++) {
      float sum = simd_sum(result[r][o]);
      if (params.has_bias != 0) sum += bias[ulong(block.expert) * params.rows + min(first + o, params.rows - 1)];
      if (lane == 0 && uint(r) < block.count && first + o < params.rows)
        out[ulong(pairs[block.first + uint(r)]) * params.rows + first + o] = sum;
    }
}
