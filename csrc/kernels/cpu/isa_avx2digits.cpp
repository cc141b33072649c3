// Products of digits with AVX2, with the bits of the CUDA kernels. The file has nothing else.
#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "this file wants the flags that CMakeLists.txt gives it"
#endif

#define MOEFLUX_ISA avx2digits
#include "kernels/cpu/digits.inl"

namespace moeflux::cpu {

extern const DigitKernels avx2_digits;
const DigitKernels avx2_digits = avx2digits::digit_kernels;

}  // namespace moeflux::cpu

#endif
