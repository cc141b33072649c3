// Products of whole numbers with AVX-512 F, BW, VL and DQ, without VNNI. The file has nothing else.
#if defined(__x86_64__)
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || !defined(__AVX512DQ__)
#error "this file wants the flags that CMakeLists.txt gives it"
#endif

#define MOEFLUX_ISA avx512pairs
#include "kernels/cpu/matmul_int16.inl"

namespace moeflux::cpu {

extern const Int16Kernels avx512_int16;
const Int16Kernels avx512_int16 = avx512pairs::int16_kernels;

}  // namespace moeflux::cpu

#endif
