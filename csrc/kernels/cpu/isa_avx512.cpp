// AVX-512 F, BW, VL and DQ.
#if defined(__x86_64__)
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || !defined(__AVX512DQ__)
#error "this file wants the flags that CMakeLists.txt gives it"
#endif

#define MOEFLUX_ISA avx512
#include "kernels/cpu/families.inl"

namespace moeflux::cpu {

extern const Kernels avx512_kernels;
const Kernels avx512_kernels = avx512::kernels;

}  // namespace moeflux::cpu

#endif
