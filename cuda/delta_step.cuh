// The delta-net of one row of each of some sessions, all of it between its products: the convolution, norms and gates,
// the recurrence, then the gated norms of its heads and their digits, with the bits of the ops by themselves.
#include "gates.h"
#include "kept_digits.h"

// A block has a value head of a session, and two of them share a key head: each makes its query and key, and the second
// one keeps these. They are a cluster, because nobody may keep what the other has yet to load. Where there are no
// clusters, the first block takes both heads.

struct alignas(16) HeadOfStep {
  float inputs[3][part_columns];  // query, key and value
  float gates[part_columns];      // behind the norm, and its weights
  float norms[part_columns];
  float out[part_columns];
  Gates by;
};

// The sums of the eight lanes that have a row.
template <u32 rows>
DEV void add_lanes(float (&sums)[rows]) {
#pragma unroll
  for (u32 distance = delta_lanes / 2; distance > 0; distance /= 2)
#pragma unroll
    for (u32 r = 0; r < rows; r++) sums[r] += __shfl_xor_sync(everyone, sums[r], distance);
}
DEV void add_fours(float4& sum, const float4& a, const float4& b) {
  sum.x = fmaf(a.x, b.x, sum.x), sum.y = fmaf(a.y, b.y, sum.y);
  sum.z = fmaf(a.z, b.z, sum.z), sum.w = fmaf(a.w, b.w, sum.w);
}

// States and what the convolution keeps were written by earlier batches, so they are loaded before the kernel waits for
// the one before. Of the recurrence, a thread has as many numbers of two rows as take_token's.
DEV void take_head(const DeltaStepParams& params, u32 second, HeadOfStep& own) {
  constexpr u32 dim = part_columns, each = dim / lanes, quads = dim / 4 / delta_lanes,
                places = step_threads / delta_lanes, rows = dim / places;
  const DeltaInputsParams& inputs = params.inputs;
  const ConvParams& conv = inputs.conv;
  const HeadParams& heads = params.heads;
  const u32 session = blockIdx.y, key_head = blockIdx.x / 2, warp = warp_of(), lane = lane_of();
  const u32 head = params.neighbours > 1 ? key_head * 2 + second : key_head + second * inputs.key_heads;
  const u32 part = threadIdx.x % delta_lanes, place = threadIdx.x / delta_lanes;
  float4* state = reinterpret_cast<float4*>(params.states[session] + u64(head) * dim * dim);
  const auto number_of_state = [&](u32 r, u32 c) { return (place + r * places) * (dim / 4) + c * delta_lanes + part; };
  float4 held[rows][quads];
#pragma unroll
  for (u32 r = 0; r < rows; r++)
#pragma unroll
    for (u32 c = 0; c < quads; c++) held[r][c] = state[number_of_state(r, c)];
  // A thread each has a channel of query, key and value, and a gate behind these.
  const u32 kind = threadIdx.x / dim, i = threadIdx.x % dim;
  const u32 conv_head = kind == 0 ? key_head : kind == 1 ? inputs.key_heads + key_head : 2 * inputs.key_heads + head;
  const u32 channel = conv_head * dim + i;
  const u64 channels = conv.channels;
  float* taps = conv.sessions[session] + channel;
  float4 weights = {};
  float before[3] = {}, number = 0.0f;
  if (kind < 3) {
    weights = reinterpret_cast<const float4*>(conv.weight)[channel];
#pragma unroll
    for (u32 t = 0; t < 3; t++) before[t] = taps[t * channels];
  } else {
    own.norms[i] = heads.weight[i];
  }
  wait_for_previous();
  if (kind < 3) {
    number = conv.x[session * channels + channel];
    float sum = fmaf(before[0], weights.x, 0.0f);
    sum = fmaf(before[1], weights.y, sum);
    sum = fmaf(before[2], weights.z, sum);
    const float out = silu(fmaf(number, weights.w, sum));
    own.inputs[kind][i] = out;
    if (kind == 2) conv.out[session * channels + channel] = out;
  } else {
    const float gate = heads.gate[u64(session) * heads.gate_row_stride + head * heads.gate_head_stride + i];
    if (i == dim - 1) {
      const u64 at = u64(session) * heads.heads + head;
      own.by = gates_at(inputs.gates, at);
      keep_gates(inputs.gates, at, own.by);
    }
    own.gates[i] = silu(gate);
  }
  arrive_in_cluster();
  __syncthreads();
  if (warp < 2) {
    const bool is_query = warp == 0;
    float numbers[each], squares = 0.0f;
#pragma unroll
    for (u32 c = 0; c < each; c++) numbers[c] = own.inputs[warp][lane + c * lanes];
#pragma unroll
    for (u32 c = 0; c < each; c++) squares = fmaf(numbers[c], numbers[c], squares);
    const float factor = 1.0f / sqrtf(warp_sum(squares) / float(dim) + (is_query ? inputs.q_eps : inputs.k_eps));
    const float scale = is_query ? inputs.q_scale : inputs.k_scale;
    float* kept = conv.out + session * channels + ((is_query ? 0 : inputs.key_heads) + key_head) * dim + lane;
#pragma unroll
    for (u32 c = 0; c < each; c++) {
      numbers[c] = numbers[c] * factor * scale;
      own.inputs[warp][lane + c * lanes] = numbers[c];
      if (second) kept[c * lanes] = numbers[c];
    }
  }
  await_cluster();
  if (kind == 2 || (kind < 2 && second)) taps[0] = before[1], taps[channels] = before[2], taps[2 * channels] = number;
  __syncthreads();
  const Gates by = own.by;
  float4 keys[quads];
  float sums[rows];
#pragma unroll
  for (u32 c = 0; c < quads; c++) keys[c] = reinterpret_cast<const float4*>(own.inputs[1])[c * delta_lanes + part];
#pragma unroll
  for (u32 r = 0; r < rows; r++) {
    float4 found = {};
#pragma unroll
    for (u32 c = 0; c < quads; c++) {
      float4& now = held[r][c];
      now.x *= by.decay, now.y *= by.decay, now.z *= by.decay, now.w *= by.decay;
      add_fours(found, now, keys[c]);
    }
    sums[r] = (found.x + found.y) + (found.z + found.w);
  }
  add_lanes(sums);
#pragma unroll
  for (u32 r = 0; r < rows; r++) {
    const float correction = (own.inputs[2][place + r * places] - sums[r]) * by.beta;
    const float4 corrections = {correction, correction, correction, correction};
    float4 read = {};
#pragma unroll
    for (u32 c = 0; c < quads; c++) {
      add_fours(held[r][c], corrections, keys[c]);
      add_fours(read, held[r][c], reinterpret_cast<const float4*>(own.inputs[0])[c * delta_lanes + part]);
      state[number_of_state(r, c)] = held[r][c];
    }
    sums[r] = (read.x + read.y) + (read.z + read.w);
  }
  add_lanes(sums);
#pragma unroll
  for (u32 r = 0; r < rows; r++)
    if (part == 0) own.out[place + r * places] = sums[r];
  __syncthreads();
  if (warp > 0) return;
  float numbers[each], squares = 0.0f;
#pragma unroll
  for (u32 c = 0; c < each; c++) numbers[c] = own.out[lane + c * lanes];
#pragma unroll
  for (u32 c = 0; c < each; c++) squares = fmaf(numbers[c], numbers[c], squares);
  const float factor = 1.0f / sqrtf(warp_sum(squares) / float(dim) + heads.eps);
  float* x = heads.x + u64(session) * heads.row_stride + head * heads.head_stride;
#pragma unroll
  for (u32 c = 0; c < each; c++) {
    const u32 at = lane + c * lanes;
    x[at] = own.out[at] = numbers[c] * factor * own.norms[at] * own.gates[at];
  }
  __syncwarp();
  constexpr u32 packs = dim / pack;
  const u32 index = lane % packs;
  float of_pack[pack];
#pragma unroll
  for (u32 j = 0; j < pack; j++) of_pack[j] = own.out[index * pack + j];
  DigitGroup group;
  const Digits made = digits_of(of_pack, copied_steps, group);
  if (lane < packs) keep_digits(params.to, heads.heads * dim, session, head * packs + index, made, group);
}

// Grid of blocks of step_threads: value heads, sessions.
DEV void take_step(const DeltaStepParams& params) {
  __shared__ HeadOfStep own;
  let_next_come();
  const u32 second = blockIdx.x % 2;
#if defined(MOEFLUX_CLUSTERS)
  take_head(params, second, own);
#else
  if (second) return;
  take_head(params, 0, own);
  __syncthreads();
  take_head(params, 1, own);
#endif
}

KERNEL(delta_step, DeltaStepParams, (step_threads, 2)CLUSTER_OF(2), take_step)
