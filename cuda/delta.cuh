// The gated delta-net: a short convolution, the gates, and the recurrence on a state per value head.
#include "basics.h"

// ---- The convolution ------------------------------------------------------------------------------------------------

// Rows of the state.
DEV u32 kept_rows(const ConvParams& params) { return (params.taps - 1) * params.dilation; }
// Of the rows of the state, oldest first, and behind them those of the input.
DEV float tap(const ConvParams& params, u64 row, u32 channel) {
  const u32 kept = kept_rows(params);
  return row < kept ? params.state[row * params.channels + channel]
                    : params.x[(row - kept) * params.channels + channel];
}
DEV void convolve(const ConvParams& params, u32 row, u32 channel) {
  float sum = 0.0f;
  for (u32 i = 0; i < params.taps; i++)
    sum =
        fmaf(tap(params, row + u64(i) * params.dilation, channel), params.weight[u64(channel) * params.taps + i], sum);
  params.out[u64(row) * params.channels + channel] = silu(sum);
}
// The last rows of state and input become the state. Each row comes from a later one.
DEV void keep_last(const ConvParams& params, u32 channel) {
  for (u32 row = 0; row < kept_rows(params); row++)
    params.state[u64(row) * params.channels + channel] = tap(params, u64(row) + params.n, channel);
}

// A thread has a channel, in all rows of a session. Grid of threads: channels, 1, sessions.
extern "C" __global__ void conv1d_few(const ConvParams all) {
  begin_kernel();
  const u32 channel = blockIdx.x * blockDim.x + threadIdx.x;
  if (channel >= all.channels) return;
  ConvParams params = all;
  if (all.sessions) {
    params.state = all.sessions[blockIdx.z];
    params.x += u64(blockIdx.z) * all.channels;
    params.out += u64(blockIdx.z) * all.channels;
  }
  for (u32 row = 0; row < params.n; row++) convolve(params, row, channel);
  keep_last(params, channel);
}

// A thread has a number of the output, and the state comes after. Grid of threads: channels, rows.
extern "C" __global__ void conv1d(const ConvParams params) {
  begin_kernel();
  const u32 channel = blockIdx.x * blockDim.x + threadIdx.x;
  if (channel < params.channels) convolve(params, blockIdx.y, channel);
}
extern "C" __global__ void conv1d_state(const ConvParams params) {
  begin_kernel();
  const u32 channel = blockIdx.x * blockDim.x + threadIdx.x;
  if (channel < params.channels) keep_last(params, channel);
}

// ---- The recurrence -------------------------------------------------------------------------------------------------

// ln(1 + x) for x >= 0. A small x is not lost.
DEV float log_of_one_plus(float x) {
  const float sum = 1.0f + x;
  return sum == 1.0f ? x : logf(sum) * (x / (sum - 1.0f));
}
DEV float softplus(float x) { return fmaxf(x, 0.0f) + log_of_one_plus(expf(-fabsf(x))); }

struct Gates {
  float decay;
  float beta;
};
DEV Gates gates_at(const DeltaGatesParams& params, u64 i) {
  const u32 head = u32(i % params.heads);
  return {expf(-expf(params.a_log[head]) * softplus(params.alpha[i] + params.dt_bias[head])), sigmoid(params.b[i])};
}
DEV void keep_gates(const DeltaGatesParams& params, u64 i, const Gates& gates) {
  params.decay[i] = gates.decay;
  params.beta[i] = gates.beta;
}

// Grid of threads: n * heads.
extern "C" __global__ void delta_gates(const DeltaGatesParams params) {
  begin_kernel();
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < params.count) keep_gates(params, i, gates_at(params, i));
}

// What a lane needs of a token.
template <u32 chunks>
struct DeltaToken {
  float keys[chunks];
  float queries[chunks];
  float value;
  Gates gates;

  DEV void load(const DeltaParams& params, u32 token, u32 head, u32 row) {
    const u32 key_head = head / params.neighbours % params.key_heads;
    const float* query = params.q + u64(token) * params.q_row_stride + key_head * params.q_head_stride;
    const float* key = params.k + u64(token) * params.k_row_stride + key_head * params.k_head_stride;
    const u64 gate = u64(token) * params.value_heads + head;
    gates = params.gates.alpha ? gates_at(params.gates, gate) : Gates{params.decay[gate], params.beta[gate]};
    if (params.gates.alpha && blockIdx.x == 0 && threadIdx.x == 0) keep_gates(params.gates, gate, gates);
    value = params.v[u64(token) * params.v_row_stride + head * params.v_head_stride + row];
#pragma unroll
    for (u32 c = 0; c < chunks; c++) {
      const u32 i = lane_of() + c * lanes;
      keys[c] = i < params.key_dim ? key[i] : 0.0f;
      queries[c] = i < params.key_dim ? query[i] : 0.0f;
    }
  }
};

// A warp has one row of a head's state in registers. It takes that through all rows of the call, one by one, so the
// size of a chunk changes nothing. What the next one needs is loaded before a row is taken. `chunks` times 32 numbers
// are room for a key. Grid of blocks: delta_values rows of the state, value heads, sessions.
template <u32 chunks>
DEV void gated_delta(const DeltaParams& all) {
  begin_kernel();
  DeltaParams params = all;
  if (all.sessions) {
    const u64 of = blockIdx.z;
    params.state = all.sessions[of];
    params.q += of * all.q_row_stride, params.k += of * all.k_row_stride, params.v += of * all.v_row_stride;
    params.decay += of * all.value_heads, params.beta += of * all.value_heads;
    params.out += of * all.value_heads * all.value_dim;
  }
  const u32 row = blockIdx.x * delta_values + warp_of(), head = blockIdx.y, lane = lane_of();
  if (row >= params.value_dim) return;
  float* state = params.state + (u64(head) * params.value_dim + row) * params.key_dim;
  float held[chunks];
#pragma unroll
  for (u32 c = 0; c < chunks; c++) held[c] = lane + c * lanes < params.key_dim ? state[lane + c * lanes] : 0.0f;
  DeltaToken<chunks> next;
  next.load(params, 0, head, row);
  for (u32 token = 0; token < params.n; token++) {
    const DeltaToken<chunks> now = next;
    if (token + 1 < params.n) next.load(params, token + 1, head, row);
    float found = 0.0f, read = 0.0f;
#pragma unroll
    for (u32 c = 0; c < chunks; c++) {
      held[c] *= now.gates.decay;
      found = fmaf(held[c], now.keys[c], found);
    }
    const float correction = (now.value - warp_sum(found)) * now.gates.beta;
#pragma unroll
    for (u32 c = 0; c < chunks; c++) {
      held[c] = fmaf(correction, now.keys[c], held[c]);
      read = fmaf(held[c], now.queries[c], read);
    }
    read = warp_sum(read);
    if (lane == 0) params.out[(u64(token) * params.value_heads + head) * params.value_dim + row] = read;
  }
#pragma unroll
  for (u32 c = 0; c < chunks; c++)
    if (lane + c * lanes < params.key_dim) state[lane + c * lanes] = held[c];
}
extern "C" __global__ void gated_delta_4(const DeltaParams params) { gated_delta<4>(params); }
extern "C" __global__ void gated_delta_8(const DeltaParams params) { gated_delta<8>(params); }
