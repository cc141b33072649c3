#include "kernels/cpu/hyper.h"

namespace moeflux::cpu::MOEFLUX_ISA {

static void scaled_silu(float* x, float factor, int64_t count) {
  for_vectors(count, [&](int64_t i, auto get, auto put)
                         __attribute__((always_inline)) { put(x + i, silu(get(x + i) * factor)); });
}

static void hyper_mix(const float* normed, const float* gates, float* out, int64_t streams, int64_t width,
                      int64_t first, int64_t last) {
  const float share = 1.0f / static_cast<float>(streams);
  for_vectors(last - first, [&](int64_t i, auto get, auto put) __attribute__((always_inline)) {
    Floats sum{};
    for (int64_t j = 0; j < streams; ++j) {
      const int64_t at = j * width + first + i;
      sum = fma(get(normed + at), sigmoid(get(gates + at)), sum);
    }
    put(out + first + i, sum * share);
  });
}

static void hyper_add(float* x, const float* y, float gate, int64_t count) {
  const Floats factor = sigmoid(splat(gate)) * 2.0f;
  for_vectors(count, [&](int64_t i, auto get, auto put)
                         __attribute__((always_inline)) { put(x + i, fma(factor, get(y + i), get(x + i))); });
}

static void ngram_gate(const float* key, const float* query, const float* value, float* out, int64_t width) {
  Floats products{};
  for_vectors(width, [&](int64_t i, auto get, auto)
                         __attribute__((always_inline)) { products = fma(get(key + i), get(query + i), products); });
  const float score = sum(products) / __builtin_sqrtf(static_cast<float>(width));
  const float size = score < 0 ? -score : score;
  const float root = __builtin_sqrtf(size < 1e-6f ? 1e-6f : size);  // NaN stays NaN
  const Floats gate = sigmoid(splat(score == 0 ? 0.0f : score < 0 ? -root : root));
  for_vectors(width, [&](int64_t i, auto get, auto put)
                         __attribute__((always_inline)) { put(out + i, gate * get(value + i)); });
}

constexpr HyperKernels hyper_kernels{scaled_silu, hyper_mix, hyper_add, ngram_gate};

}  // namespace moeflux::cpu::MOEFLUX_ISA
