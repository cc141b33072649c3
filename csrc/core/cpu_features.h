// What an x86-64 processor can do, and the operating system saves the registers of.
//
// The processor is asked itself. __builtin_cpu_supports would ask a table in the compiler's own library, which clang
// does not have everywhere: zig's lacks it.
#pragma once

#if defined(__x86_64__)
namespace moeflux {

struct CpuFeatures {
  bool sse41 = false;
  bool sha = false;
  bool fma = false;
  bool f16c = false;
  bool avx2 = false;
  bool avx512f = false;
  bool avx512bw = false;
  bool avx512dq = false;
  bool avx512vl = false;
  bool avx512vnni = false;
  bool amx = false;  // tiles, for int8 and bf16; a process also needs the permission of the system
};

const CpuFeatures& cpu_features();

}  // namespace moeflux
#endif
