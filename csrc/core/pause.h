// What a thread does while it looks at a word of memory again and again: it leaves the core to its neighbour there.
#pragma once

#include <thread>

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

// Returns when `ready` says so, which another thread is about to bring about. That thread may be waiting for this very
// core.
template <typename Ready>
void await_soon(const Ready& ready) {
  for (int spins = 0; !ready(); ++spins) {
    if (spins < 1000)
      pause();
    else
      std::this_thread::yield();
  }
}

}  // namespace moeflux
