// Atomics, relaxed as Metal's are.
#pragma once
#pragma GCC system_header
#include "types.h"

namespace metal {

enum memory_order { memory_order_relaxed };

template <typename T>
struct atomic {
  T value;
};
typedef atomic<uint> atomic_uint;
typedef atomic<int> atomic_int;

template <typename Pointer>
MSL_INLINE auto atomic_load_explicit(Pointer place, memory_order) {
  return __atomic_load_n(&place->value, __ATOMIC_RELAXED);
}
template <typename Pointer, typename T>
MSL_INLINE void atomic_store_explicit(Pointer place, T value, memory_order) {
  __atomic_store_n(&place->value, value, __ATOMIC_RELAXED);
}
template <typename Pointer, typename T>
MSL_INLINE auto atomic_fetch_add_explicit(Pointer place, T value, memory_order) {
  return __atomic_fetch_add(&place->value, value, __ATOMIC_RELAXED);
}
template <typename Pointer, typename T>
MSL_INLINE auto atomic_fetch_max_explicit(Pointer place, T value, memory_order) {
  return __atomic_fetch_max(&place->value, value, __ATOMIC_RELAXED);
}

}  // namespace metal
