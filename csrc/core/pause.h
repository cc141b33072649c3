// What a thread does while it looks at a word of memory again and again: it leaves the core to its neighbour there.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moeflux {

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace moeflux
