// AVX2 with FMA and F16C.
#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "this file wants the flags that CMakeLists.txt gives it"
#endif

#define MOEFLUX_ISA avx2
#include "kernels/cpu/families.inl"

namespace moeflux::cpu {

extern const Kernels avx2_kernels;
const Kernels avx2_kernels = avx2::kernels;

}  // namespace moeflux::cpu

#endif
