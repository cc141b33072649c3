// Barriers, and what the 32 lanes of a simdgroup tell each other. The few operations that depend on what runs the
// kernel are in simdgroup_cpu.h and simdgroup_ptx.h.
#pragma once
#pragma GCC system_header
#include "math.h"

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
MSL_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

struct simd_vote {
  typedef ulong vote_t;
  vote_t lanes;
  explicit constexpr simd_vote(vote_t lanes) : lanes(lanes) {}
  explicit operator vote_t() const { return lanes; }
  bool all() const { return lanes == 0xffffffffu; }
  bool any() const { return lanes != 0; }
};

// Metal exchanges narrower numbers too. Kernels here do not: what they sum in 16 bits they would lose.
template <typename T>
constexpr bool is_exchanged = is_same_v<T, float> || is_same_v<T, int> || is_same_v<T, uint>;

// What a sum, a maximum ... of lanes is made of. Functions, not lambdas: a kernel may have none either.
struct simd_adds {
  template <typename T>
  MSL_INLINE T apply(T a, T b) {
    return a + b;
  }
};
struct simd_takes_greater {
  template <typename T>
  MSL_INLINE T apply(T a, T b) {
    return max(a, b);
  }
};
struct simd_takes_smaller {
  template <typename T>
  MSL_INLINE T apply(T a, T b) {
    return min(a, b);
  }
};
struct simd_ands {
  template <typename T>
  MSL_INLINE T apply(T a, T b) {
    return a & b;
  }
};
struct simd_ors {
  template <typename T>
  MSL_INLINE T apply(T a, T b) {
    return a | b;
  }
};

}  // namespace metal

#if defined(MSL_CPU)
#include "simdgroup_cpu.h"
#else
#include "simdgroup_ptx.h"
#endif

namespace metal {

template <typename T>
MSL_INLINE T simd_broadcast(T value, ushort lane) {
  return simd_shuffle(value, lane);
}
template <typename T>
MSL_INLINE T simd_sum(T value) {
  return simd_fold<simd_adds>(value);
}
template <typename T>
MSL_INLINE T simd_max(T value) {
  return simd_fold<simd_takes_greater>(value);
}
template <typename T>
MSL_INLINE T simd_min(T value) {
  return simd_fold<simd_takes_smaller>(value);
}
template <typename T>
MSL_INLINE T simd_and(T value) {
  return simd_fold<simd_ands>(value);
}
template <typename T>
MSL_INLINE T simd_or(T value) {
  return simd_fold<simd_ors>(value);
}

}  // namespace metal
