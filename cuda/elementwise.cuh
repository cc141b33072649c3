// Norms, activations, sums, rotations, copies: what touches each number of a row once or twice.
#include "cached.h"
#include "words.h"

// ---- Words ----------------------------------------------------------------------------------------------------------

// Words go to another place of the GPU's memory, or to the host's. No place of a launch has what another one is copied
// to. Grid of blocks of flat_threads: of words; places.
extern "C" __global__ void copy_words(const WordsParams params) {
  begin_kernel();
  constexpr u32 together = copied_words / flat_threads;
  const WordsPlaces places = params.list ? params.list[blockIdx.y] : params.places;
  u32 words[together];
#pragma unroll
  for (u32 j = 0; j < together; j++) {
    const u32 at = blockIdx.x * copied_words + j * flat_threads + threadIdx.x;
    if (at < params.count) words[j] = places.from[at];
  }
#pragma unroll
  for (u32 j = 0; j < together; j++) {
    const u32 at = blockIdx.x * copied_words + j * flat_threads + threadIdx.x;
    if (at < params.count) places.to[at] = words[j];
  }
}
// A single block writes a few words that are its arguments.
extern "C" __global__ void given_words(const GivenWordsParams params) {
  begin_kernel();
  for (u32 i = threadIdx.x; i < params.count; i += flat_threads) params.to[i] = params.words[i];
}

// ---- Norms ----------------------------------------------------------------------------------------------------------

// A block for each row. In place too: each thread writes what only it has read after the sum.
extern "C" __global__ void rms_norm(const NormParams params) {
  __shared__ float scratch[row_threads / lanes];
  begin_kernel();
  const float* x = params.x + u64(blockIdx.x) * params.width;
  float* out = params.out + u64(blockIdx.x) * params.width;
  const float factor = norm_factor(x, params.width, params.eps, scratch);
  constexpr u32 together = 8;  // numbers of a thread that are loaded before any is written
  for (u32 first = threadIdx.x; first < params.width; first += together * row_threads) {
    float numbers[together], weights[together];
#pragma unroll
    for (u32 j = 0; j < together; j++) {
      const u32 i = min(first + j * row_threads, params.width - 1);
      numbers[j] = x[i], weights[j] = params.weight[i];
    }
#pragma unroll
    for (u32 j = 0; j < together; j++)
      if (first + j * row_threads < params.width) out[first + j * row_threads] = normed(numbers[j], factor, weights[j]);
  }
}

// A warp for each row, in place. The mean and then the squares: a chain in each lane, and the sum of the lanes.
extern "C" __global__ void layer_norm(const LayerNormParams params) {
  begin_kernel();
  const u64 row = u64(blockIdx.x) * head_warps + warp_of();
  if (row >= params.n) return;
  float* x = params.x + row * params.width;
  float total = 0.0f, squares = 0.0f;
  for (u32 i = lane_of(); i < params.width; i += lanes) total += x[i];
  const float mean = warp_sum(total) / float(params.width);
  for (u32 i = lane_of(); i < params.width; i += lanes) squares = fmaf(x[i] - mean, x[i] - mean, squares);
  const float factor = 1.0f / sqrtf(warp_sum(squares) / float(params.width) + params.eps);
  for (u32 i = lane_of(); i < params.width; i += lanes)
    x[i] = fmaf((x[i] - mean) * factor, params.weight[i], params.bias[i]);
}

// A warp for each head, in place. Whole warps stay or go.
struct Head {
  u32 row;
  u32 head;
  bool is_there;
};
DEV Head head_of(const HeadParams& params) {
  const u64 i = u64(blockIdx.x) * head_warps + warp_of();
  return {u32(i / params.heads), u32(i % params.heads), i < u64(params.heads) * params.n};
}
extern "C" __global__ void rms_norm_heads(const HeadParams params) {
  begin_kernel();
  const Head at = head_of(params);
  if (!at.is_there) return;
  float* x = params.x + u64(at.row) * params.row_stride + at.head * params.head_stride;
  constexpr u32 together = 16;  // numbers that are loaded before any is used
  float squares = 0.0f;         // as head_factor has them: zeros behind the last number add nothing
#pragma unroll 1
  for (u32 first = lane_of(); first < params.dim; first += together * lanes) {
    float numbers[together];
#pragma unroll
    for (u32 j = 0; j < together; j++) numbers[j] = first + j * lanes < params.dim ? x[first + j * lanes] : 0.0f;
#pragma unroll
    for (u32 j = 0; j < together; j++) squares = fmaf(numbers[j], numbers[j], squares);
  }
  const float factor = 1.0f / sqrtf(warp_sum(squares) / float(params.dim) + params.eps);
#pragma unroll 1
  for (u32 first = lane_of(); first < params.dim; first += together * lanes) {
    float numbers[together], weights[together];
#pragma unroll
    for (u32 j = 0; j < together; j++) {
      const u32 i = first + j * lanes;
      numbers[j] = i < params.dim ? x[i] : 0.0f;
      weights[j] = params.weight && i < params.dim ? params.weight[i] : 0.0f;
    }
#pragma unroll
    for (u32 j = 0; j < together; j++) {
      const float normed = numbers[j] * factor;
      if (first + j * lanes < params.dim)
        x[first + j * lanes] = (params.weight ? normed * weights[j] : normed) * params.scale;
    }
  }
}

extern "C" __global__ void gated_rms_norm(const HeadParams params) {
  begin_kernel();
  const Head at = head_of(params);
  if (!at.is_there) return;
  float* x = params.x + u64(at.row) * params.row_stride + at.head * params.head_stride;
  const float* gate = params.gate + u64(at.row) * params.gate_row_stride + at.head * params.gate_head_stride;
  const float factor = head_factor(x, params.dim, params.eps);
  for (u32 i = lane_of(); i < params.dim; i += lanes) x[i] = x[i] * factor * params.weight[i] * silu(gate[i]);
}

// ---- A thread a number ----------------------------------------------------------------------------------------------

DEV u64 place_of_thread() { return u64(blockIdx.x) * blockDim.x + threadIdx.x; }

extern "C" __global__ void swiglu(const SwigluParams params) {
  begin_kernel();
  const u64 i = place_of_thread();
  if (i < params.count)
    params.gate[i] = gated(params.gate[i], params.up[i], params.alpha, params.limit, params.is_geglu);
}

extern "C" __global__ void residual_add(const FlatParams params) {
  begin_kernel();
  const u64 i = place_of_thread();
  if (i < params.count) params.x[i] = params.x[i] + params.y[i];
}

extern "C" __global__ void scale(const FactorParams params) {
  begin_kernel();
  const u64 i = place_of_thread();
  if (i < params.count) params.x[i] = params.x[i] * params.factor;
}

// x = factor * tanh(x / factor), and tanh(y) = 2 sigmoid(2 y) - 1
extern "C" __global__ void soft_cap(const FactorParams params) {
  begin_kernel();
  const u64 i = place_of_thread();
  if (i >= params.count) return;
  params.x[i] = (sigmoid(params.x[i] * (2.0f / params.factor)) * 2.0f - 1.0f) * params.factor;
}

// The same bias to every row.
extern "C" __global__ void bias_add(const BiasParams params) {
  begin_kernel();
  const u64 i = place_of_thread();
  if (i < params.count) params.x[i] = params.x[i] + params.bias[i % params.width];
}

// x *= sigmoid(gate), head by head.
extern "C" __global__ void sigmoid_gate(const HeadParams params) {
  begin_kernel();
  const u64 i = place_of_thread();
  if (i >= u64(params.n) * params.heads * params.dim) return;
  const u32 at = u32(i % params.dim);
  const u64 row = i / params.dim / params.heads, head = i / params.dim % params.heads;
  float& x = params.x[row * params.row_stride + head * params.head_stride + at];
  x = x * sigmoid(params.gate[row * params.gate_row_stride + head * params.gate_head_stride + at]);
}

// One pair of a head. `angles`: of the row.
DEV void turn(const RopeParams& params, const float* angles, u32 pair, float* x) {
  const float* angle = angles + pair * 2;
  const u32 first = params.interleaved ? 2 * pair : pair;
  const u32 second = params.interleaved ? 2 * pair + 1 : pair + params.half_dim;
  const float a = x[first], b = x[second];
  x[first] = a * angle[0] - b * angle[1];
  x[second] = a * angle[1] + b * angle[0];
}

// Rotates the first 2 * half_dim channels in place.
extern "C" __global__ void rope(const RopeParams params) {
  begin_kernel();
  const u64 i = place_of_thread();
  if (i >= u64(params.n) * params.heads * params.half_dim) return;
  const u32 pair = u32(i % params.half_dim);
  const u64 row = i / params.half_dim / params.heads, head = i / params.half_dim % params.heads;
  turn(params, params.angles + row * params.half_dim * 2, pair,
       params.x + row * params.row_stride + head * params.head_stride);
}

// ---- Rows that a session keeps --------------------------------------------------------------------------------------

// Whose row of the call it is, and which of theirs.
struct RowsOf {
  const CachedRows* rows;
  u64 row;
};
DEV RowsOf rows_of(const AppendParams& params, u64 row) {
  return params.sessions ? RowsOf{params.sessions[row], 0} : RowsOf{params.rows, row};
}

// Rows to a cache, rounded to its type.
DEV void keep(float* to, float x) { *to = x; }
DEV void keep(u16* to, float x) { *to = to_bf16(x); }
template <typename T>
DEV void append(const AppendParams& params) {
  begin_kernel();
  const u64 i = place_of_thread();
  if (i >= u64(params.n) * params.width) return;
  const u32 column = u32(i % params.width);
  const u64 row = i / params.width;
  const RowsOf of = rows_of(params, row);
  const u64 kept = of.rows->first + of.row;
  T* rows = reinterpret_cast<T*>(cached_rows(of.rows, kept, params.begin));
  keep(rows + kept % cached_block * params.width + column, params.x[row * params.x_stride + column]);
}
extern "C" __global__ void append_f32(const AppendParams params) { append<float>(params); }
extern "C" __global__ void append_bf16(const AppendParams params) { append<u16>(params); }

// A row's heads of queries, keys and values. What norms, ropes and appends make by themselves. A warp each.
// Grid of blocks: heads, rows.
template <typename T>
DEV void heads_row(const HeadsRowParams& params) {
  constexpr u32 most = max_attention_dim / lanes;  // numbers of a lane
  __shared__ float heads[head_warps][max_attention_dim];
  __shared__ float angles[max_attention_dim];
  let_next_come();
  const u32 row_of_x = blockIdx.y;
  u32 head = blockIdx.x * head_warps + warp_of();
  const u32 dim = params.q.dim, values = params.values.width / dim;
  const bool is_query = head < params.q.heads, is_key = !is_query && head < params.q.heads + params.k.heads;
  const bool has_norm = is_query || is_key;
  head -= is_query ? 0 : is_key ? params.q.heads : params.q.heads + params.k.heads;
  const bool is_there = has_norm || head < values;
  // Lists and angles are there before any kernel of the batch, and nobody writes weights.
  for (u32 i = threadIdx.x; i < 2 * params.rope.half_dim; i += blockDim.x)
    angles[i] = params.rope.angles[row_of_x * 2 * params.rope.half_dim + i];
  const HeadParams& norm = is_query ? params.q : params.k;
  const AppendParams& kept = is_key ? params.keys : params.values;
  T* to = nullptr;
  if (is_there && !is_query) {
    const CachedRows* rows = kept.sessions ? kept.sessions[row_of_x] : kept.rows;
    const u64 row = rows->first;
    to = reinterpret_cast<T*>(cached_rows(rows, row, kept.begin)) + row % cached_block * kept.width + head * dim;
  }
  float numbers[most] = {}, weights[most];
#pragma unroll
  for (u32 c = 0; c < most; c++) {
    if (c * lanes >= dim) break;
    const u32 i = lane_of() + c * lanes;
    weights[c] = has_norm && norm.weight && i < dim ? norm.weight[i] : 1.0f;
  }
  __syncthreads();
  wait_for_previous();
  if (!is_there) return;
  float *own = heads[warp_of()], *x = norm.x + u64(row_of_x) * norm.row_stride + u64(head) * norm.head_stride;
  const float* from = has_norm ? x : params.values.x + u64(row_of_x) * params.values.x_stride + head * dim;
#pragma unroll
  for (u32 c = 0; c < most; c++) {
    if (c * lanes >= dim) break;
    numbers[c] = lane_of() + c * lanes < dim ? from[lane_of() + c * lanes] : 0.0f;
  }
  float factor = 1.0f;
  if (has_norm) {  // as head_factor, where zeros behind the last number add nothing
    float squares = 0.0f;
#pragma unroll
    for (u32 c = 0; c < most; c++) squares = fmaf(numbers[c], numbers[c], squares);
    factor = 1.0f / sqrtf(warp_sum(squares) / float(dim) + norm.eps);
  }
#pragma unroll
  for (u32 c = 0; c < most; c++) {
    if (c * lanes >= dim) break;
    const float normed = numbers[c] * factor;
    if (lane_of() + c * lanes < dim)
      own[lane_of() + c * lanes] = has_norm ? (norm.weight ? normed * weights[c] : normed) * norm.scale : numbers[c];
  }
  __syncwarp();
  if (has_norm) {
    for (u32 pair = lane_of(); pair < params.rope.half_dim; pair += lanes) turn(params.rope, angles, pair, own);
    __syncwarp();
    for (u32 i = lane_of(); i < dim; i += lanes) x[i] = own[i];
  }
  if (is_query) return;
  for (u32 i = lane_of(); i < dim; i += lanes) keep(to + i, own[i]);
}
extern "C" __global__ void heads_row_f32(const HeadsRowParams params) { heads_row<float>(params); }
extern "C" __global__ void heads_row_bf16(const HeadsRowParams params) { heads_row<u16>(params); }

// Rows to codes, and the scales of their heads, which lie behind the codes of a block. Every rounding is that of the
// oracle's quantize_rows. A warp each.
extern "C" __global__ void append_codes(const AppendParams params) {
  begin_kernel();
  const u32 heads = params.width / params.dim;
  const u64 i = u64(blockIdx.x) * head_warps + warp_of();
  if (i >= u64(params.n) * heads) return;
  const u64 head = i % heads;
  const RowsOf of = rows_of(params, i / heads);
  const u64 row = of.rows->first + of.row;
  const float* x = params.x + i / heads * params.x_stride + head * params.dim;
  u8* rows = cached_rows(of.rows, row, params.begin);
  u8* codes = rows + row % cached_block * params.width + head * params.dim;
  u32 bits = 0;  // without signs they are in the order of the numbers; NaN is above infinity
  for (u32 j = lane_of(); j < params.dim; j += lanes) bits = max(bits, __float_as_uint(x[j]) & 0x7fffffffu);
  for (u32 distance = lanes / 2; distance > 0; distance /= 2)
    bits = max(bits, __shfl_xor_sync(everyone, bits, distance));
  const bool is_finite = bits < 0x7f800000u;
  const u16 rounded = to_bf16(is_finite ? __uint_as_float(bits) / 127.0f : 0.0f);
  const bool is_coded = bf16(rounded) >= 0x1p-100f;
  const float inverse = is_coded ? 1.0f / bf16(rounded) : 0.0f;
  for (u32 j = lane_of(); j < params.dim; j += lanes) codes[j] = is_coded ? u8(__float2int_rn(x[j] * inverse)) : u8(0);
  u16* scales = reinterpret_cast<u16*>(rows + u64(cached_block) * params.width);
  if (lane_of() == 0)
    scales[head * cached_block + row % cached_block] = is_coded ? rounded : u16(is_finite ? 0 : 0x7fc0);
}

// ---- Combine --------------------------------------------------------------------------------------------------------

// (residual + the experts in the router's order) + the shared one. In place with the residual, if there is one.
extern "C" __global__ void combine(const CombineParams params) {
  begin_kernel();
  const u64 i = place_of_thread();
  if (i >= u64(params.n) * params.hidden) return;
  const u64 row = i / params.hidden, column = i % params.hidden;
  float routed = 0.0f;
  for (u32 j = 0; j < params.k; j++)
    routed =
        fmaf(params.weights[row * params.k + j], params.outputs[(row * params.k + j) * params.hidden + column], routed);
  float total = params.residual ? params.residual[i] + routed : routed;
  if (params.shared) total += params.shared[i] * (params.shared_gate ? sigmoid(params.shared_gate[row]) : 1.0f);
  params.out[i] = total;
}
