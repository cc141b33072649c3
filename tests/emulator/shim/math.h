// Math functions. What a kernel may call is what Metal has: expf and friends must not be found.
#pragma once
#pragma GCC system_header
#include "types.h"

// libm and libdevice under names of our own, so that the C names stay unknown to kernels.
extern "C" {
#if defined(MSL_CPU)
#define MSL_LIBRARY1(name) float msl_##name(float) __asm__(#name "f");
#define MSL_LIBRARY2(name) float msl_##name(float, float) __asm__(#name "f");
#else
#define MSL_LIBRARY1(name) float msl_##name(float) __asm__("__nv_" #name "f");
#define MSL_LIBRARY2(name) float msl_##name(float, float) __asm__("__nv_" #name "f");
float msl_nv_rsqrt(float) __asm__("__nv_rsqrtf");
#endif
MSL_LIBRARY1(exp)
MSL_LIBRARY1(exp2)
MSL_LIBRARY1(log)
MSL_LIBRARY1(log2)
MSL_LIBRARY1(sin)
MSL_LIBRARY1(cos)
MSL_LIBRARY1(tanh)
MSL_LIBRARY2(pow)
MSL_LIBRARY2(fmod)
#undef MSL_LIBRARY1
#undef MSL_LIBRARY2
}

namespace metal {

#if defined(MSL_PTX)
MSL_INLINE float reciprocal_root(float x) { return msl_nv_rsqrt(x); }
#else
MSL_INLINE float reciprocal_root(float x) { return 1.0f / __builtin_sqrtf(x); }
#endif

#define MSL_FUNCTION(name, expression)                  \
  MSL_INLINE float name(float x) { return expression; } \
  MSL_INLINE half name(half narrow) {                   \
    float x = narrow;                                   \
    return half(expression);                            \
  }                                                     \
  template <int n>                                      \
  MSL_INLINE vec<float, n> name(vec<float, n> all) {    \
    vec<float, n> result;                               \
    for (int i = 0; i < n; i++) {                       \
      float x = all[i];                                 \
      result[i] = expression;                           \
    }                                                   \
    return result;                                      \
  }
#define MSL_FUNCTIONS                                                \
  MSL_FUNCTION(exp, msl_exp(x))                                      \
  MSL_FUNCTION(exp2, msl_exp2(x))                                    \
  MSL_FUNCTION(log, msl_log(x))                                      \
  MSL_FUNCTION(log2, msl_log2(x))                                    \
  MSL_FUNCTION(sin, msl_sin(x))                                      \
  MSL_FUNCTION(cos, msl_cos(x))                                      \
  MSL_FUNCTION(tanh, msl_tanh(x))                                    \
  MSL_FUNCTION(sqrt, __builtin_sqrtf(x))                             \
  MSL_FUNCTION(rsqrt, reciprocal_root(x))                            \
  MSL_FUNCTION(fabs, __builtin_fabsf(x))                             \
  MSL_FUNCTION(floor, __builtin_floorf(x))                           \
  MSL_FUNCTION(ceil, __builtin_ceilf(x))                             \
  MSL_FUNCTION(round, __builtin_roundf(x))                           \
  MSL_FUNCTION(rint, __builtin_rintf(x))                             \
  MSL_FUNCTION(trunc, __builtin_truncf(x))                           \
  MSL_INLINE float pow(float a, float b) { return msl_pow(a, b); }   \
  MSL_INLINE float fmod(float a, float b) { return msl_fmod(a, b); } \
  MSL_INLINE float divide(float a, float b) { return a / b; }
MSL_FUNCTIONS
namespace precise {
MSL_FUNCTIONS
}
namespace fast {
MSL_FUNCTIONS
}
#undef MSL_FUNCTIONS
#undef MSL_FUNCTION

MSL_INLINE bool isnan(float x) { return __builtin_isnan(x); }
MSL_INLINE bool isinf(float x) { return __builtin_isinf(x); }
MSL_INLINE bool isfinite(float x) { return __builtin_isfinite(x); }
MSL_INLINE float abs(float x) { return __builtin_fabsf(x); }
MSL_INLINE int abs(int x) { return x < 0 ? -x : x; }
MSL_INLINE float copysign(float a, float b) { return __builtin_copysignf(a, b); }
MSL_INLINE float saturate(float x) { return x < 0.0f ? 0.0f : x > 1.0f ? 1.0f : x; }

MSL_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <int n>
MSL_INLINE vec<float, n> fma(vec<float, n> a, vec<float, n> b, vec<float, n> c) {
  vec<float, n> result;
  for (int i = 0; i < n; i++) result[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return result;
}

// One type for all arguments, as in Metal: min(x, 0) of a float and an int is refused.
template <typename T>
MSL_INLINE T min(T a, T b) {
  if constexpr (__is_same(T, half) || __is_same(T, bfloat))
    return b < a ? b : a;
  else
    return __builtin_elementwise_min(a, b);
}
template <typename T>
MSL_INLINE T max(T a, T b) {
  if constexpr (__is_same(T, half) || __is_same(T, bfloat))
    return a < b ? b : a;
  else
    return __builtin_elementwise_max(a, b);
}
template <typename T>
MSL_INLINE T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <typename T>
MSL_INLINE T mix(T a, T b, T t) {
  return a + (b - a) * t;
}
template <typename T>
MSL_INLINE T select(T no, T yes, bool condition) {
  return condition ? yes : no;
}
template <typename T, int n>
MSL_INLINE T dot(vec<T, n> a, vec<T, n> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < n; i++) sum += a[i] * b[i];
  return sum;
}

MSL_INLINE uint popcount(uint x) { return __builtin_popcount(x); }
MSL_INLINE uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
MSL_INLINE uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
MSL_INLINE uint extract_bits(uint x, uint offset, uint bits) {
  return bits == 0 ? 0 : (x >> offset) & (0xffffffffu >> (32 - bits));
}

}  // namespace metal
