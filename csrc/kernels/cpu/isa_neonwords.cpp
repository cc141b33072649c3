// Products of whole numbers with NEON. The file has nothing else.
#if defined(__aarch64__)
#if !defined(__ARM_NEON)
#error "this file wants the flags that CMakeLists.txt gives it"
#endif

#define MOEFLUX_ISA neonwords
#include "kernels/cpu/matmul_words.inl"

namespace moeflux::cpu {

extern const Int16Kernels neon_int16;
const Int16Kernels neon_int16 = neonwords::int16_kernels;

}  // namespace moeflux::cpu

#endif
