// Products of whole numbers with AVX2. The file has nothing else.
#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "this file wants the flags that CMakeLists.txt gives it"
#endif

#define MOEFLUX_ISA avx2words
#include "kernels/cpu/matmul_words.inl"

namespace moeflux::cpu {

extern const Int16Kernels avx2_int16;
const Int16Kernels avx2_int16 = avx2words::int16_kernels;

}  // namespace moeflux::cpu

#endif
