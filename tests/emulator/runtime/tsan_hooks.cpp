// The functions that -fsanitize=thread makes a compiler call at every load and store. ThreadSanitizer's own runtime is
// not linked: these are instead of it.
#include <cstring>

#include "execution.h"

namespace {

// Threads of kernels alone call these. There is nothing to do in a dispatch that is not checked.
void check(const void* place, size_t bytes, bool write, bool atomic, bool aligned, const void* site) {
  emulator::Execution& execution = emulator::of_this_fiber();
  if (!execution.options.check) return;
  execution.checker.access(
      execution, {reinterpret_cast<uintptr_t>(place), static_cast<uint32_t>(bytes), write, atomic, aligned, site});
}

}  // namespace

#define SITE __builtin_return_address(0)
#define PLAIN_HOOKS(n)                                                                       \
  void __tsan_read##n(void* place) { check(place, n, false, false, true, SITE); }            \
  void __tsan_write##n(void* place) { check(place, n, true, false, true, SITE); }            \
  void __tsan_unaligned_read##n(void* place) { check(place, n, false, false, false, SITE); } \
  void __tsan_unaligned_write##n(void* place) { check(place, n, true, false, false, SITE); } \
  void __tsan_read_write##n(void* place) { __tsan_read##n(place), __tsan_write##n(place); }  \
  void __tsan_unaligned_read_write##n(void* place) {                                         \
    __tsan_unaligned_read##n(place), __tsan_unaligned_write##n(place);                       \
  }

#define ATOMIC_HOOKS(T)                                                             \
  T __tsan_atomic32_load(const T* place, int) {                                     \
    check(place, 4, false, true, true, SITE);                                       \
    return *place;                                                                  \
  }                                                                                 \
  void __tsan_atomic32_store(T* place, T value, int) {                              \
    check(place, 4, true, true, true, SITE);                                        \
    *place = value;                                                                 \
  }                                                                                 \
  T __tsan_atomic32_fetch_add(T* place, T value, int) {                             \
    check(place, 4, true, true, true, SITE);                                        \
    const T before = *place;                                                        \
    *place = before + value;                                                        \
    return before;                                                                  \
  }                                                                                 \
  T __tsan_atomic32_compare_exchange_val(T* place, T expected, T value, int, int) { \
    check(place, 4, true, true, true, SITE);                                        \
    const T before = *place;                                                        \
    if (before == expected) *place = value;                                         \
    return before;                                                                  \
  }

extern "C" {

PLAIN_HOOKS(1)
PLAIN_HOOKS(2)
PLAIN_HOOKS(4)
PLAIN_HOOKS(8)
PLAIN_HOOKS(16)
ATOMIC_HOOKS(uint32_t)

void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  if (bytes) check(from, bytes, false, false, false, SITE);
  if (bytes) check(to, bytes, true, false, false, SITE);
  return memmove(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, size_t bytes) { return __tsan_memcpy(to, from, bytes); }
void* __tsan_memset(void* to, int value, size_t bytes) {
  if (bytes) check(to, bytes, true, false, false, SITE);
  return memset(to, value, bytes);
}

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

}  // extern "C"
