// The gated delta-net: a short convolution, the gates, and the recurrence on a state per value head.
#include "common.h"

// The convolution, then SiLU. Grid of threads: channels, rows. The state is as it was before the call: [(taps -
// 1) * dilation, channels].
kernel void conv1d(constant ConvParams& params [[buffer(0)]], device const float* x [[buffer(1)]],
                   device const float* state [[buffer(2)]], device const float* weight [[buffer(3)]],
                   device float* out [[buffer(4)]], uint2 at [[thread_position_in_grid]]) {
  if (at.x >= params.channels) return;
  const uint kept = (params.taps - 1) * params.dilation;
  float sum = 0.0f;
  for (uint tap = 0; tap < params.taps; tap++) {
    const uint row = at.y + tap * params.dilation;  // first of the state's rows, then of the input's
    const float value =
        row < kept ? state[ulong(row) * params.channels + at.x] : x[ulong(row - kept) * params.channels + at.x];
    sum = fma(value, weight[at.x * params.taps + tap], sum);
  }
  out[ulong(at.y) * params.channels + at.x] = silu(sum);
}

// The last rows of state and input become the state. Grid of threads: channels.
kernel void conv1d_state(constant ConvParams& params [[buffer(0)]], device const float* x [[buffer(1)]],
                         device float* state [[buffer(2)]], uint channel [[thread_position_in_grid]]) {
  if (channel >= params.channels) return;
  const uint kept = (params.taps - 1) * params.dilation;
  for (uint row = 0; row < kept; row++) {
    const uint from = row + params.n;
    state[ulong(row) * params.channels + channel] = from < kept ? state[ulong(from) * params.channels + channel]
                                                                : x[ulong(from - kept) * params.channels + channel];
  }
}

// ln(1 + x) for x >= 0. A small x is not lost.
inline float log_of_one_plus(float x) {
  const float sum = 1.0f + x;
  return sum == 1.0f ? x : precise::log(sum) * (x / (sum - 1.0f));
}
inline float softplus(float x) { return max(x, 0.0f) + log_of_one_plus(precise::exp(-fabs(x))); }

// Grid of threads: n * heads.
kernel void delta_gates(constant DeltaGatesParams& params [[buffer(0)]], device const float* alpha [[buffer(1)]],
                        device const float* b [[buffer(2)]], device const float* a_log [[buffer(3)]],
                        device const float* dt_bias [[buffer(4)]], device float* decay [[buffer(5)]],
                        device float* beta [[buffer(6)]], uint i [[thread_position_in_grid]]) {
  if (i >= params.count) return;
  const uint head = i % params.heads;
  decay[i] = precise::exp(-precise::exp(a_log[head]) * softplus(alpha[i] + dt_bias[head]));
  beta[i] = sigmoid(b[i]);
}

// A simdgroup has one row of a head's state in registers. It takes that through all rows of the call, one by one, so
// the size of a chunk changes nothing. Grid of threadgroups: delta_values rows of the state, value heads.
kernel void gated_delta(constant DeltaParams& params [[buffer(0)]], device const float* q [[buffer(1)]],
                        device const float* k [[buffer(2)]], device const float* v [[buffer(3)]],
                        device const float* decay [[buffer(4)]], device const float* beta [[buffer(5)]],
                        device float* state [[buffer(6)]], device float* out [[buffer(7)]],
                        uint2 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr uint chunks = max_key_dim / lanes;
  const uint row = group.x * delta_values + simdgroup, head = group.y;
  if (row >= params.value_dim) return;
  const uint key_head = head / params.neighbours % params.key_heads;
  state += (ulong(head) * params.value_dim + row) * params.key_dim;
  float held[chunks];
  for (uint c = 0; c < chunks; c++) held[c] = lane + c * lanes < params.key_dim ? state[lane + c * lanes] : 0.0f;
  for (uint token = 0; token < params.n; token++) {
    device const float* query = q + ulong(token) * params.q_row_stride + key_head * params.q_head_stride;
    device const float* key = k + ulong(token) * params.k_row_stride + key_head * params.k_head_stride;
    const ulong gate = ulong(token) * params.value_heads + head;
    float keys[chunks], found = 0.0f, read = 0.0f;
    for (uint c = 0; c < chunks; c++) {
      const uint i = lane + c * lanes;
      keys[c] = i < params.key_dim ? key[i] : 0.0f;
      held[c] *= decay[gate];
      found = fma(held[c], keys[c], found);
    }
    const float value = v[ulong(token) * params.v_row_stride + head * params.v_head_stride + row];
    const float correction = (value - simd_sum(found)) * beta[gate];
    for (uint c = 0; c < chunks; c++) {
      const uint i = lane + c * lanes;
      held[c] = fma(correction, keys[c], held[c]);
      read = fma(held[c], i < params.key_dim ? query[i] : 0.0f, read);
    }
    read = simd_sum(read);
    if (lane == 0) out[gate * params.value_dim + row] = read;
  }
  for (uint c = 0; c < chunks; c++)
    if (lane + c * lanes < params.key_dim) state[lane + c * lanes] = held[c];
}
