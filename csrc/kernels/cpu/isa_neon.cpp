// NEON, which every aarch64 machine has.
#if defined(__aarch64__)
#if !defined(__ARM_NEON)
#error "this file wants the flags that CMakeLists.txt gives it"
#endif

#define MOEFLUX_ISA neon
#include "kernels/cpu/families.inl"

namespace moeflux::cpu {

extern const Kernels neon_kernels;
const Kernels neon_kernels = neon::kernels;

}  // namespace moeflux::cpu

#endif
