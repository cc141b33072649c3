#include "core/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>

namespace moeflux {
namespace {

struct Registers {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
};

bool bit(unsigned value, int place) { return (value >> place & 1) != 0; }

// The registers that the system saves, a bit for each kind.
uint64_t saved_registers() {
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

CpuFeatures detect() {
  CpuFeatures found;
  Registers basic;
  Registers more;
  if (__get_cpuid(1, &basic.a, &basic.b, &basic.c, &basic.d) == 0) return found;
  __get_cpuid_count(7, 0, &more.a, &more.b, &more.c, &more.d);  // all zero where there is no such leaf
  constexpr uint64_t of_avx = 0x6;
  constexpr uint64_t of_avx512 = 0xe6;
  const bool says = bit(basic.c, 27);  // whether the system lets us ask which it saves
  const uint64_t saved = says ? saved_registers() : 0;
  const bool avx = bit(basic.c, 28) && (saved & of_avx) == of_avx;
  const bool avx512 = avx && (saved & of_avx512) == of_avx512;
  found.sse41 = bit(basic.c, 19);
  found.sha = bit(more.b, 29);
  found.fma = avx && bit(basic.c, 12);
  found.f16c = avx && bit(basic.c, 29);
  found.avx2 = avx && bit(more.b, 5);
  found.avx512f = avx512 && bit(more.b, 16);
  found.avx512dq = avx512 && bit(more.b, 17);
  found.avx512bw = avx512 && bit(more.b, 30);
  found.avx512vl = avx512 && bit(more.b, 31);
  found.avx512vnni = avx512 && bit(more.c, 11);
  found.amx = bit(more.d, 22) && bit(more.d, 24) && bit(more.d, 25);
  return found;
}

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures found = detect();
  return found;
}

}  // namespace moeflux
#endif
