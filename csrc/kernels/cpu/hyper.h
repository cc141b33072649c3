// Residual streams that are mixed by gates, and the gate of an n-gram embedding.
//
// Each function handles numbers of one row. A row of streams is [streams, width].
#pragma once

#include <cstdint>

namespace moeflux::cpu {

struct HyperKernels {
  // x = silu(x * factor)
  void (*silu)(float* x, float factor, int64_t count);
  // Columns first ... last - 1: the mean over the streams of normed * sigmoid(gates).
  void (*hyper_mix)(const float* normed, const float* gates, float* out, int64_t streams, int64_t width, int64_t first,
                    int64_t last);
  // x += y * 2 sigmoid(gate)
  void (*hyper_add)(float* x, const float* y, float gate, int64_t count);
  // One stream: value * sigmoid(g). With s = key . query / sqrt(width), g is the root of |s|, or of 1e-6 where that is
  // more, with the sign of s; 0 where s is.
  void (*ngram_gate)(const float* key, const float* query, const float* value, float* out, int64_t width);
};

}  // namespace moeflux::cpu
