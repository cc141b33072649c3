// What comes before the delta-net in a step of several sessions.
#include "gates.h"

// What comes between a product and the recurrence, of one row of each of some sessions: a convolution of four taps, the
// norms of queries and of keys, and the gates, with the bits of the ops by themselves. A warp has the channels of a
// head. Grid of blocks of head_warps: heads, then one for the gates; sessions.
DEV void make_delta_inputs(const DeltaInputsParams& params) {
  constexpr u32 most = max_key_dim / lanes;  // channels of a lane
  let_next_come();
  const ConvParams& conv = params.conv;
  const u32 session = blockIdx.y, dim = params.dim;
  if (blockIdx.x + 1 == gridDim.x) {
    wait_for_previous();
    const DeltaGatesParams& gates = params.gates;
    for (u32 head = threadIdx.x; head < gates.heads; head += blockDim.x)
      keep_gates(gates, u64(session) * gates.heads + head, gates_at(gates, u64(session) * gates.heads + head));
    return;
  }
  const u32 head = blockIdx.x * head_warps + warp_of(), first = head * dim + lane_of();
  const u64 channels = conv.channels;
  if (first >= channels) return;
  float* state = conv.sessions ? conv.sessions[session] : conv.state;
  float4 weights[most];
#pragma unroll
  for (u32 c = 0; c < most; c++)
    if (c * lanes < dim) weights[c] = reinterpret_cast<const float4*>(conv.weight)[first + c * lanes];
  wait_for_previous();
  float before[most][3], numbers[most];
#pragma unroll
  for (u32 c = 0; c < most; c++) {
    if (c * lanes >= dim) break;
    const u32 channel = first + c * lanes;
#pragma unroll
    for (u32 i = 0; i < 3; i++) before[c][i] = state[i * channels + channel];
    numbers[c] = conv.x[session * channels + channel];
  }
  float squares = 0.0f;
#pragma unroll
  for (u32 c = 0; c < most; c++) {
    if (c * lanes >= dim) break;
    float* kept = state + first + c * lanes;
    kept[0] = before[c][1], kept[channels] = before[c][2], kept[2 * channels] = numbers[c];
    float sum = fmaf(before[c][0], weights[c].x, 0.0f);
    sum = fmaf(before[c][1], weights[c].y, sum);
    sum = fmaf(before[c][2], weights[c].z, sum);
    numbers[c] = silu(fmaf(numbers[c], weights[c].w, sum));
    squares = fmaf(numbers[c], numbers[c], squares);
  }
  const bool is_query = head < params.key_heads, has_norm = head < 2 * params.key_heads;
  const float factor = 1.0f / sqrtf(warp_sum(squares) / float(dim) + (is_query ? params.q_eps : params.k_eps));
  const float scale = is_query ? params.q_scale : params.k_scale;
  float* out = conv.out + session * channels + first;
#pragma unroll
  for (u32 c = 0; c < most; c++) {
    if (c * lanes >= dim) break;
    out[c * lanes] = has_norm ? numbers[c] * factor * scale : numbers[c];
  }
}

KERNEL(delta_inputs, DeltaInputsParams, (head_warps * lanes), make_delta_inputs)
