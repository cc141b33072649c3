// The gated delta-net: the gates, and the recurrence on a state per value head.
#include "gates.h"
#include "pending.h"

// ---- The recurrence -------------------------------------------------------------------------------------------------

// Grid of threads: n * heads.
DEV void make_gates(const DeltaGatesParams& params) {
  begin_kernel();
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < params.count) keep_gates(params, i, gates_at(params, i));
}

DEV u32 key_head_of(const DeltaParams& params, u32 head) { return head / params.neighbours % params.key_heads; }

constexpr u32 delta_quads = delta_key_dim / 4 / delta_lanes;  // of numbers that a lane has of such a key

// What a block needs of some tokens. Numbers behind the last of a key are zeros.
template <u32 quads>
struct DeltaTokens {
  float4 keys[delta_tokens][quads * delta_lanes];
  float4 queries[delta_tokens][quads * delta_lanes];
  float values[delta_tokens][delta_values];
  Gates gates[delta_tokens];
};

// What a thread brings of them, in registers until there is room.
template <u32 quads>
struct DeltaLoad {
  static constexpr u32 width = quads * delta_lanes * 4, threads = delta_warps * lanes;
  static constexpr u32 each = delta_tokens * width / threads, values_each = delta_tokens * delta_values / threads;
  float keys[each];
  float queries[each];
  float values[values_each];
  Gates gates;

  DEV void load(const DeltaParams& params, u32 first, u32 head, u32 first_row) {
    const u32 count = min(delta_tokens, params.n - first), key_head = key_head_of(params, head);
#pragma unroll
    for (u32 j = 0; j < each; j++) keys[j] = queries[j] = 0.0f;
#pragma unroll
    for (u32 j = 0; j < each; j++) {
      if (j * threads / width >= count) break;
      const u32 at = j * threads + threadIdx.x, token = at / width, i = at % width;
      const bool is_there = token < count && i < params.key_dim;
      const u64 row = first + token;
      keys[j] = is_there ? params.k[row * params.k_row_stride + key_head * params.k_head_stride + i] : 0.0f;
      queries[j] = is_there ? params.q[row * params.q_row_stride + key_head * params.q_head_stride + i] : 0.0f;
    }
#pragma unroll
    for (u32 j = 0; j < values_each; j++) {
      const u32 at = j * threads + threadIdx.x, token = at / delta_values, row = first_row + at % delta_values;
      values[j] = token < count && row < params.value_dim
                      ? params.v[u64(first + token) * params.v_row_stride + head * params.v_head_stride + row]
                      : 0.0f;
    }
    gates = {};
    if (threadIdx.x >= count || params.q_kept) return;  // a warp makes them with the norms
    const u64 gate = u64(first + threadIdx.x) * params.value_heads + head;
    gates = params.gates.alpha ? gates_at(params.gates, gate) : Gates{params.decay[gate], params.beta[gate]};
    if (params.gates.alpha && blockIdx.x == 0) keep_gates(params.gates, gate, gates);
  }

  DEV void store(DeltaTokens<quads>& to) const {
#pragma unroll
    for (u32 j = 0; j < each; j++) {
      reinterpret_cast<float*>(to.keys)[j * threads + threadIdx.x] = keys[j];
      reinterpret_cast<float*>(to.queries)[j * threads + threadIdx.x] = queries[j];
    }
#pragma unroll
    for (u32 j = 0; j < values_each; j++) reinterpret_cast<float*>(to.values)[j * threads + threadIdx.x] = values[j];
    if (threadIdx.x < delta_tokens) to.gates[threadIdx.x] = gates;
  }
};

// The norms of one row's query and key in place, by a warp each, as rms_norm_heads has them. Of the blocks that have
// this key, one keeps what comes of them.
template <u32 quads>
DEV void norm_token(const DeltaParams& params, u32 head, DeltaTokens<quads>& to) {
  if (warp_of() > 1) return;
  const bool is_query = warp_of() == 0,
             keeps = blockIdx.x == 0 && head % params.neighbours == 0 && head / params.neighbours < params.key_heads;
  const u32 at = key_head_of(params, head) * (is_query ? params.q_head_stride : params.k_head_stride);
  float* kept = (is_query ? params.q_kept : params.k_kept) + at;
  float* own = reinterpret_cast<float*>(is_query ? to.queries[0] : to.keys[0]);
  const float factor = head_factor(own, params.key_dim, is_query ? params.q_eps : params.k_eps);
  for (u32 i = lane_of(); i < params.key_dim; i += lanes) {
    own[i] = own[i] * factor * (is_query ? params.q_scale : params.k_scale);
    if (keeps) kept[i] = own[i];
  }
}

// In each of the lanes of a row: four chains each over every fourth number of the lane's, then the lanes' sums.
DEV float row_sum(const float4& x) {
  float sum = (x.x + x.y) + (x.z + x.w);
  for (u32 distance = delta_lanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(everyone, sum, distance);
  return sum;
}
DEV void add_product(float4& sum, const float4& a, const float4& b) {
  sum.x = fmaf(a.x, b.x, sum.x), sum.y = fmaf(a.y, b.y, sum.y);
  sum.z = fmaf(a.z, b.z, sum.z), sum.w = fmaf(a.w, b.w, sum.w);
}

// One token. `held` is the lane's of a row of the state, and `value` the token's for that row. What comes of it.
template <u32 quads>
DEV float take_token(const DeltaTokens<quads>& tokens, u32 token, float value, float4 (&held)[quads]) {
  const u32 lane = threadIdx.x % delta_lanes;
  const Gates gates = tokens.gates[token];
  float4 keys[quads], found = {}, read = {};
#pragma unroll
  for (u32 c = 0; c < quads; c++) {
    keys[c] = tokens.keys[token][c * delta_lanes + lane];
    float4& now = held[c];
    now.x *= gates.decay, now.y *= gates.decay, now.z *= gates.decay, now.w *= gates.decay;
    add_product(found, now, keys[c]);
  }
  const float correction = (value - row_sum(found)) * gates.beta;
  const float4 corrections = {correction, correction, correction, correction};
#pragma unroll
  for (u32 c = 0; c < quads; c++) {
    add_product(held[c], corrections, keys[c]);
    add_product(read, held[c], tokens.queries[token][c * delta_lanes + lane]);
  }
  return row_sum(read);
}

// What the gates of one row are made of, by a warp that has nothing to do while others make norms.
struct GateLoad {
  static constexpr u32 warp = 2;  // norm_token has those before
  float a_log, dt_bias, alpha, b;

  // Weights, which nobody writes.
  DEV void load_weights(const DeltaGatesParams& params, u32 head) {
    a_log = params.a_log[head], dt_bias = params.dt_bias[head];
  }
  DEV void load(const DeltaGatesParams& params, u32 head) { alpha = params.alpha[head], b = params.b[head]; }
  DEV Gates gates() const { return gates_of(a_log, dt_bias, alpha, b); }
};

// Eight lanes have a row of a head's state in registers. They take that through all rows of the call, one by one, so
// the size of a chunk changes nothing. Tokens come to shared memory some at a time, and the next ones are loaded before
// those are taken. `quads` are the fours of numbers that a lane has room for. Grid of blocks: delta_values rows of the
// state, value heads, sessions.
//
// Where norms go with it, it is all that a batch does with this state. So the state is loaded before the kernel waits
// for the one before.
template <u32 quads>
DEV void gated_delta(const DeltaParams& all) {
  __shared__ DeltaTokens<quads> tokens[2];
  let_next_come();
  const bool is_alone = all.q_kept;
  const u32 first_row = blockIdx.x * delta_values, head = blockIdx.y, lane = threadIdx.x % delta_lanes;
  const u32 place = threadIdx.x / delta_lanes, row = first_row + place;
  const bool is_there = row < all.value_dim;
  float* const states = all.sessions ? all.sessions[blockIdx.z] : all.state;  // the list was there before the batch
  // A state that the L2 cache is asked for is never wrong.
  if (!is_alone) {
    const u32 count = min(delta_values, all.value_dim - first_row) * all.key_dim;
    const float* state = states + (u64(head) * all.value_dim + first_row) * all.key_dim;
    for (u32 i = threadIdx.x * 32; i < count; i += blockDim.x * 32) prefetch_line(state + i);
  }
  GateLoad gate = {};
  const bool makes_gates = is_alone && warp_of() == GateLoad::warp;
  if (makes_gates) gate.load_weights(all.gates, head);
  if (!is_alone) wait_for_previous();
  float* state = states + (u64(head) * all.value_dim + min(row, all.value_dim - 1)) * all.key_dim;
  const bool in_fours = all.key_dim % 4 == 0 && reinterpret_cast<u64>(state) % 16 == 0;
  float4 rows[1][quads];
  float4(&held)[quads] = rows[0];
#pragma unroll
  for (u32 c = 0; c < quads; c++) {
    const u32 i = (c * delta_lanes + lane) * 4;
    const auto number = [&](u32 j) { return i + j < all.key_dim ? state[i + j] : 0.0f; };
    if (in_fours && i < all.key_dim)
      held[c] = *reinterpret_cast<const float4*>(state + i);
    else
      held[c] = {number(0), number(1), number(2), number(3)};
  }
  const bool has_room = quads == delta_quads && all.has_room;
  PendingTokens* const pending = has_room ? &pending_of(states, all.value_heads, head) : nullptr;
  if (has_room) take_pending(rows, pending->of_rows[blockIdx.x].count, pending->decays, pending->tokens, lane, row, 0);
  if (is_alone) wait_for_previous();
  if (makes_gates) gate.load(all.gates, head);
  DeltaParams params = all;
  if (all.sessions) {
    const u64 of = blockIdx.z;
    params.q += of * all.q_row_stride, params.k += of * all.k_row_stride, params.v += of * all.v_row_stride;
    params.decay += of * all.value_heads, params.beta += of * all.value_heads;
    params.out += of * all.value_heads * all.value_dim;
  }
  DeltaLoad<quads> next;
  next.load(params, 0, head, first_row);
  next.store(tokens[0]);
  if (params.q_kept) {
    __syncthreads();
    norm_token(params, head, tokens[0]);
    if (makes_gates && lane_of() == 0) {
      tokens[0].gates[0] = gate.gates();
      if (blockIdx.x == 0) keep_gates(params.gates, head, tokens[0].gates[0]);
    }
    if (threadIdx.x < delta_values && first_row + threadIdx.x < params.value_dim)
      params.v_kept[head * params.v_head_stride + first_row + threadIdx.x] = next.values[0];
  }
  __syncthreads();
  for (u32 first = 0; first < params.n; first += delta_tokens) {
    const DeltaTokens<quads>& now = tokens[first / delta_tokens % 2];
    const bool are_more = first + delta_tokens < params.n;
    if (are_more) next.load(params, first + delta_tokens, head, first_row);
    const auto take = [&](u32 token) {
      const float read = take_token<quads>(now, token, now.values[token][place], held);
      if (lane == 0 && is_there)
        params.out[(u64(first + token) * params.value_heads + head) * params.value_dim + row] = read;
    };
    if (first + delta_tokens <= params.n) {
#pragma unroll 4
      for (u32 token = 0; token < delta_tokens; token++) take(token);
    } else {
#pragma unroll 1
      for (u32 token = 0; first + token < params.n; token++) take(token);
    }
    if (are_more) next.store(tokens[(first / delta_tokens + 1) % 2]);
    __syncthreads();
  }
  if (has_room && threadIdx.x == 0) pending->of_rows[blockIdx.x].count = 0;
  if (!is_there) return;
#pragma unroll
  for (u32 c = 0; c < quads; c++) {
    const u32 i = (c * delta_lanes + lane) * 4;
    if (in_fours && i < params.key_dim) {
      *reinterpret_cast<float4*>(state + i) = held[c];
      continue;
    }
    const float numbers[4] = {held[c].x, held[c].y, held[c].z, held[c].w};
#pragma unroll
    for (u32 j = 0; j < 4; j++)
      if (i + j < params.key_dim) state[i + j] = numbers[j];
  }
}
// ---- The recurrence through many rows -------------------------------------------------------------------------------
//
// The same sums for keys of 128 numbers. Eight lanes have two rows of the state, so that a key and a query are loaded
// for both. Lanes tell each other what a token finds, and everything waits for that: so meanwhile what the token before
// reads is multiplied, and what the one before that has read is added up. Neighbours have other rows and the same part
// of each, so that shared memory has what sixteen lanes want at once.

struct ManyTokens {
  float4 keys[delta_stage][delta_quads * delta_lanes];
  float4 queries[delta_stage][delta_quads * delta_lanes];
  float values[delta_stage][delta_many_values];
};

// What eight lanes need of tokens first ... comes while the block goes on.
DEV void bring_tokens(const DeltaParams& params, u32 first, u32 head, u32 first_row, ManyTokens& to) {
  constexpr u32 threads = delta_warps * lanes, fours = delta_key_dim / 4, value_fours = delta_many_values / 4;
  const u32 count = min(delta_stage, params.n - first), key_head = key_head_of(params, head);
  const float* keys = params.k + key_head * params.k_head_stride;
  const float* queries = params.q + key_head * params.q_head_stride;
  const float* values = params.v + head * params.v_head_stride + first_row;
#pragma unroll
  for (u32 j = 0; j < delta_stage * fours / threads; j++) {
    const u32 token = j * (threads / fours) + threadIdx.x / fours, i = threadIdx.x % fours;
    if (token >= count) break;
    copy_16(&to.keys[token][i], keys + u64(first + token) * params.k_row_stride + i * 4);
    copy_16(&to.queries[token][i], queries + u64(first + token) * params.q_row_stride + i * 4);
  }
  const u32 token = threadIdx.x / value_fours, i = threadIdx.x % value_fours * 4;
  static_assert(delta_stage * value_fours == threads, "a thread copies four values");
  if (token < count) copy_16(&to.values[token][i], values + u64(first + token) * params.v_row_stride + i);
  end_of_copies();
}

// Which of the eight lanes of a row this is: these are two apart.
DEV u32 part_of_lane() { return lane_of() / 2 % delta_lanes; }

// Sums over eight lanes, in pairs as row_sum has them: parts 0 to 3 get that of a, 4 to 7 that of b.
DEV float one_of_sums(float a, float b) {
  const bool is_upper = part_of_lane() & 4;
  float sum = (is_upper ? b : a) + __shfl_xor_sync(everyone, is_upper ? a : b, 8);
  sum += __shfl_xor_sync(everyone, sum, 4);
  return sum + __shfl_xor_sync(everyone, sum, 2);
}
DEV float sum_of(const float4& x) { return (x.x + x.y) + (x.z + x.w); }

// What a lane needs of a token: of the key and the query, its numbers; of the value, those of its two rows.
struct TokenOfLane {
  float4 keys[delta_quads];
  float4 queries[delta_quads];
  float2 values;
  Gates gates;

  DEV void load(const ManyTokens& tokens, const Gates* of_tokens, u32 token, u32 place) {
    const u32 part = part_of_lane();
#pragma unroll
    for (u32 c = 0; c < delta_quads; c++) {
      keys[c] = tokens.keys[token][c * delta_lanes + part];
      queries[c] = tokens.queries[token][c * delta_lanes + part];
    }
    values = *reinterpret_cast<const float2*>(&tokens.values[token][place]);
    gates = of_tokens[token];
  }
};

// Grid of blocks: delta_many_values rows of the state, value heads.
DEV void gated_delta_of_many(const DeltaParams& params) {
  __shared__ ManyTokens tokens[2];
  __shared__ Gates gates[2][delta_stage];
  begin_kernel();
  const u32 first_row = blockIdx.x * delta_many_values, head = blockIdx.y, part = part_of_lane();
  const u32 place = (warp_of() * 4 + lane_of() / 16 * 2 + lane_of() % 2) * 2;  // of the lane's first row
  float4* state =
      reinterpret_cast<float4*>(params.state + (u64(head) * params.value_dim + first_row + place) * delta_key_dim) +
      part;
  float4 held[2][delta_quads];
#pragma unroll
  for (u32 r = 0; r < 2; r++)
#pragma unroll
    for (u32 c = 0; c < delta_quads; c++) held[r][c] = state[r * (delta_key_dim / 4) + c * delta_lanes];
  constexpr u32 counts = delta_many_values / delta_values;
  if (params.has_room) {
    const PendingTokens& pending = pending_of(params.state, params.value_heads, head);
    take_pending(held, pending.of_rows[blockIdx.x * counts].count, pending.decays, pending.tokens, part,
                 first_row + place, 1);
  }
  const auto gate_at = [&](u32 token) {
    const u64 at = u64(min(token, params.n - 1)) * params.value_heads + head;
    return Gates{params.decay[at], params.beta[at]};
  };
  bring_tokens(params, 0, head, first_row, tokens[0]);
  if (threadIdx.x < delta_stage) gates[0][threadIdx.x] = gate_at(threadIdx.x);
  const u64 row_of_out = u64(params.value_heads) * params.value_dim;
  float4 query[delta_quads] = {};  // of the token before
  float read[2] = {0.0f, 0.0f};    // of the one before that: what is left to add up
  const bool keeps = part % 4 == 0;
  u64 at = u64(head) * params.value_dim + first_row + place + part / 4 - 2 * row_of_out;  // of the output of that one
  const auto keep_read = [&](bool is_there) {
    const float sum = one_of_sums(read[0], read[1]);
    if (is_there && keeps) params.out[at] = sum;
    at += row_of_out;
  };
  const auto read_before = [&] {
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      float4 reading = {};
#pragma unroll
      for (u32 c = 0; c < delta_quads; c++) add_product(reading, held[r][c], query[c]);
      read[r] = sum_of(reading);
    }
  };
#pragma unroll 1
  for (u32 first = 0; first < params.n; first += delta_stage) {
    const u32 stage = first / delta_stage % 2, count = min(delta_stage, params.n - first);
    wait_for_copies<0>();
    __syncthreads();  // what has come is there, and nobody reads the other stage
    Gates next = {};
    if (first + delta_stage < params.n) {
      bring_tokens(params, first + delta_stage, head, first_row, tokens[stage ^ 1]);
      if (threadIdx.x < delta_stage) next = gate_at(first + delta_stage + threadIdx.x);
    }
    const ManyTokens& now = tokens[stage];
    TokenOfLane coming;
    coming.load(now, gates[stage], 0, place);
    const auto take = [&](u32 token) {
      const TokenOfLane own = coming;
      coming.load(now, gates[stage], min(token + 1, count - 1), place);
      float4 fading[2][delta_quads];
      float sums[2];
#pragma unroll
      for (u32 r = 0; r < 2; r++) {
        float4 found = {};
#pragma unroll
        for (u32 c = 0; c < delta_quads; c++) {
          const float4& before = held[r][c];
          const float decay = own.gates.decay;
          fading[r][c] = {before.x * decay, before.y * decay, before.z * decay, before.w * decay};
          add_product(found, fading[r][c], own.keys[c]);
        }
        sums[r] = sum_of(found);
      }
#pragma unroll
      for (u32 distance = delta_lanes; distance > 1; distance /= 2)
#pragma unroll
        for (u32 r = 0; r < 2; r++) sums[r] += __shfl_xor_sync(everyone, sums[r], distance);
      keep_read(first + token > 1);
      read_before();
#pragma unroll
      for (u32 r = 0; r < 2; r++) {
        const float correction = ((r ? own.values.y : own.values.x) - sums[r]) * own.gates.beta;
        const float4 corrections = {correction, correction, correction, correction};
#pragma unroll
        for (u32 c = 0; c < delta_quads; c++) {
          held[r][c] = fading[r][c];
          add_product(held[r][c], corrections, own.keys[c]);
        }
      }
#pragma unroll
      for (u32 c = 0; c < delta_quads; c++) query[c] = own.queries[c];
    };
    if (count == delta_stage) {
#pragma unroll 4
      for (u32 token = 0; token < delta_stage; token++) take(token);
    } else {
#pragma unroll 1
      for (u32 token = 0; token < count; token++) take(token);
    }
    if (threadIdx.x < delta_stage) gates[stage ^ 1][threadIdx.x] = next;
  }
  keep_read(params.n > 1);
  read_before();
  keep_read(true);
  if (params.has_room && threadIdx.x < counts)
    pending_of(params.state, params.value_heads, head).of_rows[blockIdx.x * counts + threadIdx.x].count = 0;
#pragma unroll
  for (u32 r = 0; r < 2; r++)
#pragma unroll
    for (u32 c = 0; c < delta_quads; c++) state[r * (delta_key_dim / 4) + c * delta_lanes] = held[r][c];
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

KERNEL(delta_gates, DeltaGatesParams, (flat_threads), make_gates)
KERNEL(gated_delta_4, DeltaParams, (delta_warps * lanes), gated_delta<4>)
KERNEL(gated_delta_8, DeltaParams, (delta_warps * lanes), gated_delta<8>)
KERNEL(gated_delta_many, DeltaParams, (delta_warps * lanes), gated_delta_of_many)
