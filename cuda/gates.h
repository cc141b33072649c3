// The gates of the delta-net.
#pragma once
#include "basics.h"

// ln(1 + x) for x >= 0. A small x is not lost.
DEV float log_of_one_plus(float x) {
  const float sum = 1.0f + x;
  return sum == 1.0f ? x : logf(sum) * (x / (sum - 1.0f));
}
DEV float softplus(float x) { return fmaxf(x, 0.0f) + log_of_one_plus(expf(-fabsf(x))); }

struct Gates {
  float decay;
  float beta;
};
DEV Gates gates_of(float a_log, float dt_bias, float alpha, float b) {
  return {expf(-expf(a_log) * softplus(alpha + dt_bias)), sigmoid(b)};
}
DEV Gates gates_at(const DeltaGatesParams& params, u64 i) {
  const u32 head = u32(i % params.heads);
  return gates_of(params.a_log[head], params.dt_bias[head], params.alpha[i], params.b[i]);
}
DEV void keep_gates(const DeltaGatesParams& params, u64 i, const Gates& gates) {
  params.decay[i] = gates.decay;
  params.beta[i] = gates.beta;
}
