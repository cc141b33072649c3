// Norms, activations, sums, rotations, copies: everything that touches each number of a row once or twice.
//
// Each function handles one row, or one head of a row, or `count` numbers. Any part of a longer array gives the same
// bits as the whole. Every `out` may be one of the inputs.
#pragma once

#include <cstdint>

namespace moeflux::cpu {

// Of codes. Far above the subnormal numbers, which some devices take for zeros.
constexpr float least_scale = 0x1p-100f;

struct ElementwiseKernels {
  // x * rsqrt(mean(x * x) + eps) * weight * scale. `weight` null: 1.
  void (*rms_norm)(const float* x, const float* weight, float* out, int64_t width, float eps, float scale);
  // (x - mean(x)) * rsqrt(variance(x) + eps) * weight + bias, in place.
  void (*layer_norm)(float* x, const float* weight, const float* bias, int64_t width, float eps);
  // rms_norm(x) * weight * silu(z), in place.
  void (*gated_rms_norm)(float* x, const float* z, const float* weight, int64_t width, float eps);
  // silu(gate) * up
  void (*swiglu)(const float* gate, const float* up, float* out, int64_t count);
  // gate * sigmoid(alpha * gate) * (up + 1), gate being at most `limit`, and up between -limit and limit
  void (*clamped_swiglu)(const float* gate, const float* up, float* out, int64_t count, float alpha, float limit);
  // gelu(gate) * up, by the tanh approximation of gelu
  void (*geglu)(const float* gate, const float* up, float* out, int64_t count);
  // x *= sigmoid(gate)
  void (*sigmoid_gate)(float* x, const float* gate, int64_t count);
  // out = x + y
  void (*residual_add)(const float* x, const float* y, float* out, int64_t count);
  // x *= factor
  void (*scale)(float* x, float factor, int64_t count);
  // x = cap * tanh(x / cap)
  void (*soft_cap)(float* x, float cap, int64_t count);
  // Columns first ... last - 1 of one row: (residual (null: 0) + sum of weights[j] * outputs[j * width] for j < k) +
  // shared, the shared expert (null: none) multiplied by the sigmoid of *shared_gate (null: 1).
  void (*combine)(const float* residual, const float* outputs, const float* weights, int64_t k, int64_t width,
                  const float* shared, const float* shared_gate, float* out, int64_t first, int64_t last);
  // Rotates the first 2 * half channels of one head in place. angles [half, 2]: cosine, sine.
  void (*rope)(float* x, const float* angles, int64_t half, bool interleaved);
  // To the nearest bf16, ties to even.
  void (*to_bf16)(const float* x, uint16_t* out, int64_t count);
  // To codes of -127 ... 127 for a scale that they share, whose bf16 it returns: the nearest to a 127th of the largest
  // number, ties to even. Codes are the nearest, too. So the largest number gets 127, and numbers that are codes times
  // a scale give the same again. Where it would be below least_scale, it is 0, and so are all codes; where a number is
  // not finite, it is NaN.
  uint16_t (*to_codes)(const float* x, int8_t* out, int64_t count);
};

}  // namespace moeflux::cpu
