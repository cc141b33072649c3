#include "kernels/cpu/elementwise.h"

namespace moeflux::cpu::MOEFLUX_ISA {

// Calls body(i, load, store) for each vector of `count` numbers. The last vector may be partial: its lanes past the end
// are zero when loaded and dropped when stored.
template <typename Body>
MOEFLUX_INLINE void for_vectors(int64_t count, const Body& body) {
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes)
    body(
        i, [](const float* from) __attribute__((always_inline)) { return load<Floats>(from); },
        [](float* to, Floats value) __attribute__((always_inline)) { store(to, value); });
  if (i == count) return;
  const int64_t left = count - i;
  body(
      i, [left](const float* from) __attribute__((always_inline)) { return load_some<Floats>(from, left); },
      [left](float* to, Floats value) __attribute__((always_inline)) { store_some(to, value, left); });
}

MOEFLUX_INLINE float inverse_rms(const float* x, int64_t width, float eps) {
  Floats squares{};
  for_vectors(width, [&](int64_t i, auto get, auto) __attribute__((always_inline)) {
    const Floats value = get(x + i);
    squares = fma(value, value, squares);
  });
  return 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(width) + eps);
}

static void rms_norm(const float* x, const float* weight, float* out, int64_t width, float eps, float scale) {
  const Floats factor = splat(inverse_rms(x, width, eps) * scale);
  for_vectors(width, [&](int64_t i, auto get, auto put) __attribute__((always_inline)) {
    const Floats normed = get(x + i) * factor;
    put(out + i, weight ? normed * get(weight + i) : normed);
  });
}

static void layer_norm(float* x, const float* weight, const float* bias, int64_t width, float eps) {
  Floats total{};
  for_vectors(width, [&](int64_t i, auto get, auto) __attribute__((always_inline)) { total += get(x + i); });
  const float mean = sum(total) / static_cast<float>(width);
  Floats squares{};
  int64_t whole = 0;
  for (; whole + lanes <= width; whole += lanes) {
    const Floats value = load<Floats>(x + whole) - mean;
    squares = fma(value, value, squares);
  }
  float square = sum(squares);
  for (int64_t i = whole; i < width; ++i) square += (x[i] - mean) * (x[i] - mean);
  const Floats factor = splat(1.0f / __builtin_sqrtf(square / static_cast<float>(width) + eps));
  for_vectors(width, [&](int64_t i, auto get, auto put) __attribute__((always_inline)) {
    put(x + i, fma((get(x + i) - mean) * factor, get(weight + i), get(bias + i)));
  });
}

static void gated_rms_norm(float* x, const float* z, const float* weight, int64_t width, float eps) {
  const Floats factor = splat(inverse_rms(x, width, eps));
  for_vectors(width, [&](int64_t i, auto get, auto put) __attribute__((always_inline)) {
    put(x + i, get(x + i) * factor * get(weight + i) * silu(get(z + i)));
  });
}

static void swiglu(const float* gate, const float* up, float* out, int64_t count) {
  for_vectors(count, [&](int64_t i, auto get, auto put)
                         __attribute__((always_inline)) { put(out + i, silu(get(gate + i)) * get(up + i)); });
}

// NaN stays NaN: it is not above the limit.
static void clamped_swiglu(const float* gate, const float* up, float* out, int64_t count, float alpha, float limit) {
  const Floats highest = splat(limit);
  for_vectors(count, [&](int64_t i, auto get, auto put) __attribute__((always_inline)) {
    const Floats given = get(gate + i);
    const Floats raised = get(up + i);
    const Floats clamped = given > highest ? highest : given;
    const Floats below = raised > highest ? highest : raised;
    const Floats within = below < -highest ? -highest : below;
    put(out + i, clamped * sigmoid(clamped * splat(alpha)) * (within + 1.0f));
  });
}

// gelu(x) = x / 2 * (1 + tanh(y)) = x * sigmoid(2 y), y being sqrt(2 / pi) * (x + 0.044715 x^3).
static void geglu(const float* gate, const float* up, float* out, int64_t count) {
  for_vectors(count, [&](int64_t i, auto get, auto put) __attribute__((always_inline)) {
    const Floats x = get(gate + i);
    put(out + i, x * sigmoid(x * (1.5957691216f + 0.0713548163f * (x * x))) * get(up + i));
  });
}

static void sigmoid_gate(float* x, const float* gate, int64_t count) {
  for_vectors(count, [&](int64_t i, auto get, auto put)
                         __attribute__((always_inline)) { put(x + i, get(x + i) * sigmoid(get(gate + i))); });
}

static void residual_add(const float* x, const float* y, float* out, int64_t count) {
  for_vectors(count, [&](int64_t i, auto get, auto put)
                         __attribute__((always_inline)) { put(out + i, get(x + i) + get(y + i)); });
}

static void scale(float* x, float factor, int64_t count) {
  for_vectors(count, [&](int64_t i, auto get, auto put)
                         __attribute__((always_inline)) { put(x + i, get(x + i) * splat(factor)); });
}

// tanh(y) = 2 sigmoid(2 y) - 1
static void soft_cap(float* x, float cap, int64_t count) {
  const float twice = 2.0f / cap;
  for_vectors(count, [&](int64_t i, auto get, auto put) __attribute__((always_inline)) {
    put(x + i, (sigmoid(get(x + i) * twice) * 2.0f - 1.0f) * cap);
  });
}

static void combine(const float* residual, const float* outputs, const float* weights, int64_t k, int64_t width,
                    const float* shared, const float* shared_gate, float* out, int64_t first, int64_t last) {
  const Floats gate = shared_gate ? sigmoid(splat(*shared_gate)) : splat(1.0f);
  for_vectors(last - first, [&](int64_t i, auto get, auto put) __attribute__((always_inline)) {
    const int64_t column = first + i;
    Floats routed{};
    for (int64_t j = 0; j < k; ++j) routed = fma(splat(weights[j]), get(outputs + j * width + column), routed);
    const Floats total = residual ? get(residual + column) + routed : routed;
    put(out + column, shared ? fma(gate, get(shared + column), total) : total);
  });
}

static void rope(float* x, const float* angles, int64_t half, bool interleaved) {
  const int64_t step = interleaved ? 2 : 1;
  const int64_t second = interleaved ? 1 : half;
  for (int64_t i = 0; i < half; ++i) {
    const float cosine = angles[2 * i];
    const float sine = angles[2 * i + 1];
    const float a = x[i * step];
    const float b = x[i * step + second];
    x[i * step] = a * cosine - b * sine;
    x[i * step + second] = a * sine + b * cosine;
  }
}

static void to_bf16(const float* x, uint16_t* out, int64_t count) {
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) store_bf16(out + i, load<Floats>(x + i));
  if (i < count) store_some(out + i, to_bf16(load_some<Floats>(x + i, count - i)), count - i);
}

// visit(a vector of the numbers' bits, where they begin, how many they are).
template <typename Visit>
MOEFLUX_INLINE void for_words(const float* x, int64_t count, const Visit& visit) {
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) visit(load<Words>(x + i), i, lanes);
  if (i < count) visit(load_some<Words>(x + i, count - i), i, count - i);
}

static uint16_t to_codes(const float* x, int8_t* out, int64_t count) {
  Words greatest = {};
  for_words(x, count, [&](Words bits, int64_t, int64_t) __attribute__((always_inline)) {
    const Words size = bits & 0x7fffffffu;  // in the order of the numbers; NaN is above infinity
    greatest = size > greatest ? size : greatest;
  });
  uint32_t largest_bits = 0;
  for (int64_t i = 0; i < lanes; ++i) largest_bits = greatest[i] > largest_bits ? greatest[i] : largest_bits;
  float largest;
  __builtin_memcpy(&largest, &largest_bits, sizeof largest);
  const bool is_finite = largest < __builtin_inff();
  const Halves scale = to_bf16(splat(largest / 127.0f));
  if (!is_finite || from_bf16(scale)[0] < least_scale) {
    __builtin_memset(out, 0, static_cast<size_t>(count));
    return is_finite ? 0 : 0x7fc0;
  }
  const Floats inverse = 1.0f / from_bf16(scale);
  for_words(x, count, [&](Words bits, int64_t i, int64_t there) __attribute__((always_inline)) {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const Codes codes = narrow_codes((Ints)((Floats)bits * inverse + 0x1.8p+23f));
    __builtin_memcpy(out + i, &codes, static_cast<size_t>(there));
  });
  return scale[0];
}

constexpr ElementwiseKernels elementwise_kernels{rms_norm, layer_norm,   gated_rms_norm, swiglu,  clamped_swiglu,
                                                 geglu,    sigmoid_gate, residual_add,   scale,   soft_cap,
                                                 combine,  rope,         to_bf16,        to_codes};

}  // namespace moeflux::cpu::MOEFLUX_ISA
