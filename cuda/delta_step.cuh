// The delta-net of one row of each of some sessions, all of it between its products: the convolution, norms and gates,
// the recurrence, then the gated norms of its heads and their digits, with the bits of the ops by themselves.
#include "gates.h"
#include "kept_digits.h"
#include "pending.h"

// A block has a value head of a session, and two of them share a key head: each makes its query and key, and the second
// one keeps these. They are a cluster, because nobody may keep what the other has yet to load. Where there are no
// clusters, the first block takes both heads.
//
// A state is written in one of delta_delay steps, and heads take turns, so that every step writes as much. In between,
// the tokens that the state does not have yet are kept behind it.

struct alignas(16) HeadOfStep {
  // Of a channel of query, key and value each: what a thread has brought for itself.
  float4 weights[3 * part_columns];
  float taps[3][3 * part_columns];
  float of_gates[4];
  float inputs[3][part_columns];  // query, key and value
  float gates[part_columns];      // behind the norm, and its weights
  float norms[part_columns];
  float out[part_columns];
  float corrections[part_columns];
  PendingTokens pending;  // as the step before left them
  Gates by;
};
static_assert(sizeof(PendingTokens) % 16 == 0, "it is copied by sixteen bytes");

struct HeadPlace {
  u32 session;
  u32 key_head;
  u32 second;  // whether it is the second one that has this key head
  u32 head;
};
DEV HeadPlace place_of_head(const DeltaStepParams& params, u32 number) {
  const u32 heads = params.heads.heads, key_head = number % heads / 2, second = number % 2;
  const u32 head = params.neighbours > 1 ? key_head * 2 + second : key_head + second * params.inputs.key_heads;
  return {number / heads, key_head, second, head};
}

// Of the recurrence, a thread has as many numbers of two rows as take_token's.
constexpr u32 step_places = step_threads / delta_lanes, step_rows = part_columns / step_places;
constexpr u32 step_quads = part_columns / 4 / delta_lanes;
DEV u32 number_of_state(u32 r, u32 c) {
  const u32 part = threadIdx.x % delta_lanes, place = threadIdx.x / delta_lanes;
  return (place + r * step_places) * (part_columns / 4) + c * delta_lanes + part;
}
DEV float4* state_of(float* states, u32 head) {
  return reinterpret_cast<float4*>(states + u64(head) * part_columns * part_columns);
}

// A thread each has a channel of query, key and value, and a gate behind these.
DEV u32 kind_of() { return threadIdx.x / part_columns; }
DEV u32 channel_of(const DeltaInputsParams& inputs, const HeadPlace& at) {
  const u32 kind = kind_of();
  const u32 head = kind == 0   ? at.key_head
                   : kind == 1 ? inputs.key_heads + at.key_head
                               : 2 * inputs.key_heads + at.head;
  return head * part_columns + threadIdx.x % part_columns;
}
DEV const float* given_of(const DeltaStepParams& params, const HeadPlace& at) {
  const HeadParams& heads = params.heads;
  const ConvParams& conv = params.inputs.conv;
  return kind_of() < 3 ? conv.x + u64(at.session) * conv.channels + channel_of(params.inputs, at)
                       : heads.gate + u64(at.session) * heads.gate_row_stride + at.head * heads.gate_head_stride +
                             threadIdx.x % part_columns;
}
// Of what a gate is made, in the order in which gates_of has it.
DEV const float* of_gates(const DeltaGatesParams& gates, const HeadPlace& at, u32 i) {
  const u64 own = u64(at.session) * gates.heads + at.head;
  return i == 0 ? gates.a_log + at.head : i == 1 ? gates.dt_bias + at.head : i == 2 ? gates.alpha + own : gates.b + own;
}

// What earlier batches have kept, besides the state: what is pending, and taps. They come while the thread goes on.
DEV void bring_kept(const DeltaStepParams& params, const HeadPlace& at, HeadOfStep& own) {
  const ConvParams& conv = params.inputs.conv;
  if (kind_of() < 3) {
    const u32 channel = channel_of(params.inputs, at);
    const float* taps = conv.sessions[at.session] + channel;
    copy_16(&own.weights[threadIdx.x], reinterpret_cast<const float4*>(conv.weight) + channel);
#pragma unroll
    for (u32 t = 0; t < 3; t++) copy_4(&own.taps[t][threadIdx.x], taps + t * u64(conv.channels));
  }
  if (!params.has_room || threadIdx.x >= sizeof(PendingTokens) / 16) return;
  const PendingTokens& kept = pending_of(params.states[at.session], params.heads.heads, at.head);
  copy_16(reinterpret_cast<uint4*>(&own.pending) + threadIdx.x, reinterpret_cast<const uint4*>(&kept) + threadIdx.x);
}
// What the next step needs to know of this one. By the warps behind the first.
DEV void keep_pending(PendingTokens& kept, const HeadOfStep& own, bool writes) {
  const u32 kind = kind_of(), i = threadIdx.x % part_columns;
  const u32 count = own.pending.of_rows[0].count, step = own.pending.of_rows[0].step;
  if (!writes && kind == 1) kept.tokens[count][0][i] = own.inputs[1][i];
  if (!writes && kind == 2) kept.tokens[count][1][i] = own.corrections[i];
  if (kind < 3) return;
  if (!writes && i == 0) kept.decays[count] = own.by.decay;
  if (i < part_columns / delta_values) kept.of_rows[i] = {writes ? 0 : count + 1, (step + 1) % delta_delay};
}

// The norm of a query or a key in place. By a warp.
DEV void norm_of_head(const DeltaInputsParams& inputs, bool is_query, float* own, float* kept) {
  constexpr u32 each = part_columns / lanes;
  const u32 lane = lane_of();
  float numbers[each], squares = 0.0f;
#pragma unroll
  for (u32 c = 0; c < each; c++) numbers[c] = own[lane + c * lanes];
#pragma unroll
  for (u32 c = 0; c < each; c++) squares = fmaf(numbers[c], numbers[c], squares);
  const float factor = 1.0f / sqrtf(warp_sum(squares) / float(part_columns) + (is_query ? inputs.q_eps : inputs.k_eps));
  const float scale = is_query ? inputs.q_scale : inputs.k_scale;
#pragma unroll
  for (u32 c = 0; c < each; c++) {
    numbers[c] = numbers[c] * factor * scale;
    own[lane + c * lanes] = numbers[c];
    if (kept) kept[lane + c * lanes] = numbers[c];
  }
}

// What is read of the state to the gated norm of a head and its digits. By a warp.
DEV void end_head(const DeltaStepParams& params, const HeadPlace& at, HeadOfStep& own) {
  constexpr u32 each = part_columns / lanes, packs = part_columns / pack;
  const HeadParams& heads = params.heads;
  const u32 lane = lane_of();
  float numbers[each], squares = 0.0f;
#pragma unroll
  for (u32 c = 0; c < each; c++) numbers[c] = own.out[lane + c * lanes];
#pragma unroll
  for (u32 c = 0; c < each; c++) squares = fmaf(numbers[c], numbers[c], squares);
  const float factor = 1.0f / sqrtf(warp_sum(squares) / float(part_columns) + heads.eps);
  float* x = heads.x + u64(at.session) * heads.row_stride + at.head * heads.head_stride;
#pragma unroll
  for (u32 c = 0; c < each; c++) {
    const u32 i = lane + c * lanes;
    x[i] = own.out[i] = numbers[c] * factor * own.norms[i] * own.gates[i];
  }
  __syncwarp();
  const u32 index = lane % packs;
  float of_pack[pack];
#pragma unroll
  for (u32 j = 0; j < pack; j++) of_pack[j] = own.out[index * pack + j];
  DigitGroup group;
  const Digits made = digits_of(of_pack, copied_steps, group);
  if (lane < packs)
    keep_digits(params.to, heads.heads * part_columns, at.session, at.head * packs + index, made, group);
}

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
// the one before.
DEV void take_head(const DeltaStepParams& params, const HeadPlace& at, HeadOfStep& own) {
  constexpr u32 dim = part_columns;
  const DeltaInputsParams& inputs = params.inputs;
  const ConvParams& conv = inputs.conv;
  const HeadParams& heads = params.heads;
  const u32 warp = warp_of(), part = threadIdx.x % delta_lanes, place = threadIdx.x / delta_lanes;
  const u32 kind = kind_of(), i = threadIdx.x % dim;
  const u64 channels = conv.channels;
  bring_kept(params, at, own);
  end_of_copies();
  float4 held[step_rows][step_quads];
  {
    const float4* state = state_of(params.states[at.session], at.head);
#pragma unroll
    for (u32 r = 0; r < step_rows; r++)
#pragma unroll
      for (u32 c = 0; c < step_quads; c++) held[r][c] = state[number_of_state(r, c)];
  }
  if (kind == 3) own.norms[i] = heads.weight[i];
  wait_for_previous();
  const float given = *given_of(params, at);
  if (threadIdx.x >= step_threads - 4) {
    const u32 which = threadIdx.x % 4;
    own.of_gates[which] = *of_gates(inputs.gates, at, which);
  }
  wait_for_copies<0>();
  if (kind < 3) {
    const float4 weights = own.weights[threadIdx.x];
    float sum = fmaf(own.taps[0][threadIdx.x], weights.x, 0.0f);
    sum = fmaf(own.taps[1][threadIdx.x], weights.y, sum);
    sum = fmaf(own.taps[2][threadIdx.x], weights.z, sum);
    const float out = silu(fmaf(given, weights.w, sum));
    own.inputs[kind][i] = out;
    if (kind == 2) conv.out[at.session * channels + channel_of(inputs, at)] = out;
  } else {
    own.gates[i] = silu(given);
  }
  arrive_in_cluster();
  __syncthreads();
  if (warp < 2)
    norm_of_head(
        inputs, warp == 0, own.inputs[warp],
        at.second ? conv.out + at.session * channels + ((warp ? inputs.key_heads : 0) + at.key_head) * dim : nullptr);
  if (threadIdx.x == step_threads - 1) {
    own.by = gates_of(own.of_gates[0], own.of_gates[1], own.of_gates[2], own.of_gates[3]);
    keep_gates(inputs.gates, u64(at.session) * heads.heads + at.head, own.by);
  }
  bool writes = true;
  if (params.has_room) {
    take_pending(held, own.pending.of_rows[0].count, own.pending.decays, own.pending.tokens, part, place, step_places);
    writes = (own.pending.of_rows[0].step + at.head) % delta_delay == 0;
  }
  await_cluster();
  if (kind == 2 || (kind < 2 && at.second)) {
    float* taps = conv.sessions[at.session] + channel_of(inputs, at);
    taps[0] = own.taps[1][threadIdx.x], taps[channels] = own.taps[2][threadIdx.x], taps[2 * channels] = given;
  }
  __syncthreads();
  const Gates by = own.by;
  float4 keys[step_quads];
  float sums[step_rows];
#pragma unroll
  for (u32 c = 0; c < step_quads; c++) keys[c] = reinterpret_cast<const float4*>(own.inputs[1])[c * delta_lanes + part];
#pragma unroll
  for (u32 r = 0; r < step_rows; r++) {
    float4 found = {};
#pragma unroll
    for (u32 c = 0; c < step_quads; c++) {
      float4& now = held[r][c];
      now.x *= by.decay, now.y *= by.decay, now.z *= by.decay, now.w *= by.decay;
      add_fours(found, now, keys[c]);
    }
    sums[r] = (found.x + found.y) + (found.z + found.w);
  }
  add_lanes(sums);
#pragma unroll
  for (u32 r = 0; r < step_rows; r++) {
    const float correction = (own.inputs[2][place + r * step_places] - sums[r]) * by.beta;
    const float4 corrections = {correction, correction, correction, correction};
    if (part == 0) own.corrections[place + r * step_places] = correction;
    float4 read = {};
#pragma unroll
    for (u32 c = 0; c < step_quads; c++) {
      add_fours(held[r][c], corrections, keys[c]);
      add_fours(read, held[r][c], reinterpret_cast<const float4*>(own.inputs[0])[c * delta_lanes + part]);
    }
    sums[r] = (read.x + read.y) + (read.z + read.w);
  }
  add_lanes(sums);
#pragma unroll
  for (u32 r = 0; r < step_rows; r++)
    if (part == 0) own.out[place + r * step_places] = sums[r];
  if (writes) {
    float4* state = state_of(params.states[at.session], at.head);
#pragma unroll
    for (u32 r = 0; r < step_rows; r++)
#pragma unroll
      for (u32 c = 0; c < step_quads; c++) state[number_of_state(r, c)] = held[r][c];
  }
  __syncthreads();
  if (warp == 0)
    end_head(params, at, own);
  else if (params.has_room)
    keep_pending(pending_of(params.states[at.session], heads.heads, at.head), own, writes);
}

// Grid of blocks of step_threads: value heads in all sessions.
DEV void take_step(const DeltaStepParams& params) {
  __shared__ HeadOfStep own;
  let_next_come();
  const HeadPlace at = place_of_head(params, blockIdx.x);
#if defined(MOEFLUX_CLUSTERS)
  take_head(params, at, own);
#else
  if (at.second) return;
  take_head(params, at, own);
  __syncthreads();
  take_head(params, place_of_head(params, blockIdx.x + 1), own);
#endif
}

// What is pending, into the state of a session. Grid of blocks of step_threads: value heads.
DEV void complete(const CompleteParams& params) {
  begin_kernel();
  const u32 head = blockIdx.x;
  PendingTokens& kept = pending_of(params.state, params.heads, head);
  const u32 count = kept.of_rows[0].count;
  if (count == 0) return;
  float4* state = state_of(params.state, head);
  float4 held[step_rows][step_quads];
#pragma unroll
  for (u32 r = 0; r < step_rows; r++)
#pragma unroll
    for (u32 c = 0; c < step_quads; c++) held[r][c] = state[number_of_state(r, c)];
  take_pending(held, count, kept.decays, kept.tokens, threadIdx.x % delta_lanes, threadIdx.x / delta_lanes,
               step_places);
#pragma unroll
  for (u32 r = 0; r < step_rows; r++)
#pragma unroll
    for (u32 c = 0; c < step_quads; c++) state[number_of_state(r, c)] = held[r][c];
  __syncthreads();
  if (threadIdx.x < part_columns / delta_values) kept.of_rows[threadIdx.x].count = 0;
}

KERNEL(delta_step, DeltaStepParams, (step_threads, 2)CLUSTER_OF(2), take_step)
KERNEL(delta_complete, CompleteParams, (step_threads), complete)
