// Norms, activations, sums, rotations, copies: what touches each number of a row once or twice.
#include "common.h"

// ---- Norms ----------------------------------------------------------------------------------------------------------

// A threadgroup for each row. The sum of squares is one chain in each thread, then the sum of the lanes, then that of
// the simdgroups.
inline float inverse_root_mean_square(device const float* x, uint width, float eps, threadgroup float* scratch,
                                      uint thread_index, uint lane, uint simdgroup, uint simdgroups) {
  float squares = 0.0f;
  for (uint i = thread_index; i < width; i += row_threads) squares = fma(x[i], x[i], squares);
  squares = threadgroup_sum(squares, scratch, lane, simdgroup, simdgroups);
  return 1.0f / precise::sqrt(squares / float(width) + eps);
}

// Working in place takes another kernel, because no two buffers of a kernel may be the same memory.
kernel void rms_norm(constant NormParams& params [[buffer(0)]], device const float* x [[buffer(1)]],
                     device const float* weight [[buffer(2)]], device float* out [[buffer(3)]],
                     uint row [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                     uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float scratch[max_simdgroups];
  x += ulong(row) * params.width;
  out += ulong(row) * params.width;
  const float factor =
      inverse_root_mean_square(x, params.width, params.eps, scratch, thread_index, lane, simdgroup, simdgroups);
  for (uint i = thread_index; i < params.width; i += row_threads) out[i] = x[i] * factor * weight[i];
}

kernel void rms_norm_in_place(constant NormParams& params [[buffer(0)]], device float* x [[buffer(1)]],
                              device const float* weight [[buffer(2)]], uint row [[threadgroup_position_in_grid]],
                              uint thread_index [[thread_index_in_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]],
                              uint simdgroup [[simdgroup_index_in_threadgroup]],
                              uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float scratch[max_simdgroups];
  x += ulong(row) * params.width;
  const float factor =
      inverse_root_mean_square(x, params.width, params.eps, scratch, thread_index, lane, simdgroup, simdgroups);
  // No thread waits for another: each writes what only it has read.
  for (uint i = thread_index; i < params.width; i += row_threads) x[i] = x[i] * factor * weight[i];
}

// A simdgroup for each row, in place. The mean and then the squares: a chain in each lane, and the sum of the lanes.
kernel void layer_norm(constant NormParams& params [[buffer(0)]], device float* x [[buffer(1)]],
                       device const float* weight [[buffer(2)]], device const float* bias [[buffer(3)]],
                       uint row [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  x += ulong(row) * params.width;
  float total = 0.0f, squares = 0.0f;
  for (uint i = lane; i < params.width; i += lanes) total += x[i];
  const float mean = simd_sum(total) / float(params.width);
  for (uint i = lane; i < params.width; i += lanes) squares = fma(x[i] - mean, x[i] - mean, squares);
  const float factor = 1.0f / precise::sqrt(simd_sum(squares) / float(params.width) + params.eps);
  for (uint i = lane; i < params.width; i += lanes) x[i] = fma((x[i] - mean) * factor, weight[i], bias[i]);
}

// A simdgroup for each head, in place.
inline float head_factor(device const float* x, uint dim, float eps, uint lane) {
  float squares = 0.0f;
  for (uint i = lane; i < dim; i += lanes) squares = fma(x[i], x[i], squares);
  return 1.0f / precise::sqrt(simd_sum(squares) / float(dim) + eps);
}

kernel void rms_norm_heads(constant HeadNormParams& params [[buffer(0)]], device float* x [[buffer(1)]],
                           device const float* weight [[buffer(2)]], uint2 at [[threadgroup_position_in_grid]],
                           uint lane [[thread_index_in_simdgroup]]) {
  x += ulong(at.y) * params.row_stride + at.x * params.head_stride;
  const float factor = head_factor(x, params.dim, params.eps, lane);
  for (uint i = lane; i < params.dim; i += lanes) {
    const float normed = x[i] * factor;
    x[i] = (params.has_weight != 0 ? normed * weight[i] : normed) * params.scale;
  }
}

kernel void gated_rms_norm(constant HeadNormParams& params [[buffer(0)]], device float* x [[buffer(1)]],
                           device const float* weight [[buffer(2)]], device const float* gate [[buffer(3)]],
                           uint2 at [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  x += ulong(at.y) * params.row_stride + at.x * params.head_stride;
  gate += ulong(at.y) * params.gate_row_stride + at.x * params.gate_head_stride;
  const float factor = head_factor(x, params.dim, params.eps, lane);
  for (uint i = lane; i < params.dim; i += lanes) x[i] = x[i] * factor * weight[i] * silu(gate[i]);
}

// ---- A thread a number ----------------------------------------------------------------------------------------------

// out = silu(out) * up, out being the gate
kernel void swiglu(constant FlatParams& params [[buffer(0)]], device float* out [[buffer(1)]],
                   device const float* up [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  if (i < params.count) out[i] = silu(out[i]) * up[i];
}

// out = gelu(out) * up, out being the gate
kernel void geglu(constant FlatParams& params [[buffer(0)]], device float* out [[buffer(1)]],
                  device const float* up [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  if (i < params.count) out[i] = gelu(out[i]) * up[i];
}

// The same with clamped_swiglu.
kernel void clamped_swiglu_of(constant ClampedParams& params [[buffer(0)]], device float* out [[buffer(1)]],
                              device const float* up [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  if (i < params.count) out[i] = clamped_swiglu(out[i], up[i], params.alpha, params.limit);
}

kernel void residual_add(constant FlatParams& params [[buffer(0)]], device float* x [[buffer(1)]],
                         device const float* y [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  if (i < params.count) x[i] = x[i] + y[i];
}

kernel void scale(constant FactorParams& params [[buffer(0)]], device float* x [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) {
  if (i < params.count) x[i] = x[i] * params.factor;
}

// x = factor * tanh(x / factor), and tanh(y) = 2 sigmoid(2 y) - 1
kernel void soft_cap(constant FactorParams& params [[buffer(0)]], device float* x [[buffer(1)]],
                     uint i [[thread_position_in_grid]]) {
  if (i < params.count) x[i] = (sigmoid(x[i] * (2.0f / params.factor)) * 2.0f - 1.0f) * params.factor;
}

// The same bias to every row. Grid: numbers of a row, rows.
kernel void bias_add(constant BiasParams& params [[buffer(0)]], device float* x [[buffer(1)]],
                     device const float* bias [[buffer(2)]], uint2 at [[thread_position_in_grid]]) {
  if (at.x >= params.width) return;
  const ulong place = ulong(at.y) * params.width + at.x;
  x[place] = x[place] + bias[at.x];
}

// x *= sigmoid(gate), head by head. Grid: numbers of a head, heads, rows.
kernel void sigmoid_gate(constant HeadGateParams& params [[buffer(0)]], device float* x [[buffer(1)]],
                         device const float* gate [[buffer(2)]], uint3 at [[thread_position_in_grid]]) {
  if (at.x >= params.dim) return;
  const ulong place = ulong(at.z) * params.row_stride + at.y * params.head_stride + at.x;
  x[place] = x[place] * sigmoid(gate[ulong(at.z) * params.gate_row_stride + at.y * params.gate_head_stride + at.x]);
}

// Rotates the first 2 * half_dim channels in place. Grid: pairs, heads, rows. angles [n, half_dim, 2]: cosine, sine.
kernel void rope(constant RopeParams& params [[buffer(0)]], device float* x [[buffer(1)]],
                 device const float* angles [[buffer(2)]], uint3 at [[thread_position_in_grid]]) {
  if (at.x >= params.half_dim) return;
  device const float* angle = angles + (ulong(at.z) * params.half_dim + at.x) * 2;
  x += ulong(at.z) * params.row_stride + at.y * params.head_stride;
  const uint first = params.interleaved != 0 ? 2 * at.x : at.x;
  const uint second = params.interleaved != 0 ? 2 * at.x + 1 : at.x + params.half_dim;
  const float a = x[first], b = x[second];
  x[first] = a * angle[0] - b * angle[1];
  x[second] = a * angle[1] + b * angle[0];
}

// Rows to a cache, rounded to its type, in blocks of one buffer. Grid: numbers of a row, rows.
template <typename T>
kernel void append(constant AppendParams& params [[buffer(0)]], device const float* x [[buffer(1)]],
                   device const RowBlock* blocks [[buffer(2)]], device T* cache [[buffer(3)]],
                   uint2 at [[thread_position_in_grid]]) {
  if (at.x >= params.width) return;
  const ulong row = params.first + at.y;
  device T* rows = cache + (blocks[row / cached_block].begin + params.begin) / sizeof(T);
  rows[row % cached_block * params.width + at.x] = T(x[ulong(at.y) * params.x_stride + at.x]);
}
instantiate_kernel("append_f32", append, float)
instantiate_kernel("append_bf16", append, bfloat)

// Rows to codes, and the scales of their heads, which lie behind the codes of a block. Every rounding is that of the
// oracle's quantize_rows. A simdgroup each; grid of threadgroups: heads of a row, rows.
kernel void append_codes(constant AppendCodesParams& params [[buffer(0)]], device const float* x [[buffer(1)]],
                         device const RowBlock* blocks [[buffer(2)]], device char* cache [[buffer(3)]],
                         uint2 at [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  x += ulong(at.y) * params.x_stride + at.x * params.dim;
  const ulong row = params.first + at.y, in_block = row % cached_block;
  device char* rows = cache + blocks[row / cached_block].begin + params.begin;
  device char* codes = rows + in_block * params.width + at.x * params.dim;
  uint bits = 0;  // without signs they are in the order of the numbers; NaN is above infinity
  for (uint i = lane; i < params.dim; i += lanes) bits = max(bits, as_type<uint>(x[i]) & 0x7fffffffu);
  bits = simd_max(bits);
  const bool is_finite = bits < 0x7f800000u;
  const float largest = as_type<float>(is_finite ? bits : 0x7f800000u);
  const bfloat rounded = bfloat(is_finite ? largest / 127.0f : 0.0f);
  const bool is_coded = float(rounded) >= 0x1p-100f;
  const bfloat scale = is_coded ? rounded : as_type<bfloat>(ushort(is_finite ? 0 : 0x7fc0));
  const float inverse = is_coded ? 1.0f / float(scale) : 0.0f;
  for (uint i = lane; i < params.dim; i += lanes) codes[i] = is_coded ? char(rint(x[i] * inverse)) : char(0);
  device bfloat* scales = (device bfloat*)(rows + ulong(cached_block) * params.width);
  if (lane == 0) scales[at.x * cached_block + in_block] = scale;
}

// Numbers as they are, whatever their bits mean.
kernel void copy_numbers(constant FlatParams& params [[buffer(0)]], device const uint* from [[buffer(1)]],
                         device uint* to [[buffer(2)]], uint at [[thread_position_in_grid]]) {
  if (at < params.count) to[at] = from[at];
}

// ---- Combine ---------------------------------------------------------------------------------------------------

// Column i of one row: (residual + the experts in the router's order) + the shared one.
inline float combined(constant CombineParams& params, float residual, device const float* outputs,
                      device const float* weights, device const float* shared, device const float* shared_gate,
                      ulong row, uint i) {
  float routed = 0.0f;
  for (uint j = 0; j < params.k; j++)
    routed = fma(weights[row * params.k + j], outputs[(row * params.k + j) * params.hidden + i], routed);
  const float total = residual + routed;
  if (params.has_shared == 0) return total;
  const float gate = params.has_gate != 0 ? sigmoid(shared_gate[row]) : 1.0f;
  return total + shared[row * params.hidden + i] * gate;
}

// In place with the residual, if there is one. Grid: columns, rows.
kernel void combine(constant CombineParams& params [[buffer(0)]], device float* residual [[buffer(1)]],
                    device const float* outputs [[buffer(2)]], device const float* weights [[buffer(3)]],
                    device const float* shared [[buffer(4)]], device const float* shared_gate [[buffer(5)]],
                    uint2 at [[thread_position_in_grid]]) {
  if (at.x >= params.hidden) return;
  const ulong place = ulong(at.y) * params.hidden + at.x;
  const float before = params.has_residual != 0 ? residual[place] : 0.0f;
  residual[place] = combined(params, before, outputs, weights, shared, shared_gate, at.y, at.x);
}
