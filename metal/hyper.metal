// Residual streams that are mixed by gates, and the gate of an n-gram embedding. A row of streams is [streams, width].
#include "common.h"

kernel void silu_of(constant FactorParams& params [[buffer(0)]], device float* x [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) {
  if (i < params.count) x[i] = silu(x[i] * params.factor);
}

// A threadgroup for each stream of each row. Grid of threadgroups: streams, rows.
kernel void hyper_norm(constant StreamParams& params [[buffer(0)]], device const float* x [[buffer(1)]],
                       device const float* weight [[buffer(2)]], device float* out [[buffer(3)]],
                       uint2 at [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                       uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float scratch[max_simdgroups];
  const ulong begin = (ulong(at.y) * params.streams + at.x) * params.width;
  x += begin;
  out += begin;
  weight += ulong(at.x) * params.width;
  float squares = 0.0f;
  for (uint i = thread_index; i < params.width; i += row_threads) squares = fma(x[i], x[i], squares);
  squares = threadgroup_sum(squares, scratch, lane, simdgroup, simdgroups);
  const float factor = 1.0f / precise::sqrt(squares / float(params.width) + params.eps);
  for (uint i = thread_index; i < params.width; i += row_threads) out[i] = x[i] * factor * weight[i];
}

// The mean over the streams of normed * sigmoid(gates). Grid: columns, rows.
kernel void hyper_mix(constant StreamParams& params [[buffer(0)]], device const float* normed [[buffer(1)]],
                      device const float* gates [[buffer(2)]], device float* out [[buffer(3)]],
                      uint2 at [[thread_position_in_grid]]) {
  if (at.x >= params.width) return;
  float sum = 0.0f;
  for (uint j = 0; j < params.streams; j++) {
    const ulong place = (ulong(at.y) * params.streams + j) * params.width + at.x;
    sum = fma(normed[place], sigmoid(gates[place]), sum);
  }
  out[ulong(at.y) * params.width + at.x] = sum * (1.0f / float(params.streams));
}

// x += y * 2 sigmoid(gate / streams), each stream with its gate. Grid: columns, streams, rows.
kernel void hyper_add(constant StreamParams& params [[buffer(0)]], device float* x [[buffer(1)]],
                      device const float* y [[buffer(2)]], device const float* gates [[buffer(3)]],
                      uint3 at [[thread_position_in_grid]]) {
  if (at.x >= params.width) return;
  const ulong stream = ulong(at.z) * params.streams + at.y;
  const float factor = sigmoid(gates[stream] / float(params.streams)) * 2.0f;
  const ulong place = stream * params.width + at.x;
  x[place] = fma(factor, y[ulong(at.z) * params.width + at.x], x[place]);
}

// A simdgroup for each stream of each row. Grid of threadgroups: streams, rows.
kernel void ngram_gate(constant StreamParams& params [[buffer(0)]], device const float* key [[buffer(1)]],
                       device const float* query [[buffer(2)]], device const float* value [[buffer(3)]],
                       device float* out [[buffer(4)]], uint2 at [[threadgroup_position_in_grid]],
                       uint lane [[thread_index_in_simdgroup]]) {
  const ulong begin = (ulong(at.y) * params.streams + at.x) * params.width;
  float products = 0.0f;
  for (uint i = lane; i < params.width; i += lanes) products = fma(key[begin + i], query[begin + i], products);
  const float score = simd_sum(products) / precise::sqrt(float(params.width));
  const float size = fabs(score);
  const float root = precise::sqrt(size < 1e-6f ? 1e-6f : size);  // NaN stays NaN
  const float gate = sigmoid(score == 0.0f ? 0.0f : score < 0.0f ? -root : root);
  for (uint i = lane; i < params.width; i += lanes) out[begin + i] = gate * value[ulong(at.y) * params.width + i];
}
