// The gated delta-net: a short convolution, the gates, and the recurrence on a state per value head.
#pragma once

#include <cstdint>

namespace moeflux::cpu {

struct ConvTask {
  const float* x = nullptr;       // [rows, channels]
  float* state = nullptr;         // [kept(), channels], the oldest row first; becomes the last rows of the input
  const float* weight = nullptr;  // [channels, taps]; the last tap meets the newest row
  float* out = nullptr;           // [rows, channels], after SiLU; not where x is
  int64_t rows = 0;
  int64_t channels = 0;
  int64_t taps = 0;
  int64_t dilation = 1;  // rows from one tap to the next

  int64_t kept() const { return (taps - 1) * dilation; }
};

struct DeltaGatesTask {
  const float* alpha = nullptr;    // [rows, heads]
  const float* b = nullptr;        // [rows, heads]
  const float* a_log = nullptr;    // [heads]
  const float* dt_bias = nullptr;  // [heads]
  float* decay = nullptr;          // [rows, heads] = exp(-exp(a_log) * softplus(alpha + dt_bias))
  float* beta = nullptr;           // [rows, heads] = sigmoid(b)
  int64_t rows = 0;
  int64_t heads = 0;
};

struct DeltaTask {
  const float* q = nullptr;  // row i, key head j at q + i * q_row_stride + j * q_head_stride: key_dim numbers
  int64_t q_row_stride = 0;
  int64_t q_head_stride = 0;
  const float* k = nullptr;
  int64_t k_row_stride = 0;
  int64_t k_head_stride = 0;
  const float* v = nullptr;  // value heads, value_dim numbers each
  int64_t v_row_stride = 0;
  int64_t v_head_stride = 0;
  const float* decay = nullptr;  // [rows, value_heads]
  const float* beta = nullptr;   // [rows, value_heads]
  float* state = nullptr;        // [value_heads, value_dim, key_dim]; updated
  float* out = nullptr;          // [rows, value_heads, value_dim]
  int64_t rows = 0;
  int64_t key_heads = 0;
  int64_t value_heads = 0;  // a multiple of key_heads
  int64_t neighbours = 1;   // value heads one after another that share a key head
  int64_t key_dim = 0;
  int64_t value_dim = 0;
};

struct DeltaKernels {
  int64_t (*conv1d_units)(const ConvTask& task);
  void (*conv1d)(const ConvTask& task, int64_t unit);  // a range of channels
  int64_t (*delta_gates_units)(const DeltaGatesTask& task);
  void (*delta_gates)(const DeltaGatesTask& task, int64_t unit);  // some rows
  int64_t (*gated_delta_units)(const DeltaTask& task);
  void (*gated_delta)(const DeltaTask& task,
                      int64_t unit);  // some rows of one head's state, through all of the task's rows
};

}  // namespace moeflux::cpu
