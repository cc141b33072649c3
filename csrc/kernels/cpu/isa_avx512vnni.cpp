// AVX-512 F, BW, VL, DQ and VNNI. The file has only the kernels that use VNNI. The others are those of AVX-512.
#if defined(__x86_64__)
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || !defined(__AVX512DQ__) || \
    !defined(__AVX512VNNI__)
#error "this file wants the flags that CMakeLists.txt gives it"
#endif

#define MOEFLUX_ISA avx512vnni
#include "kernels/cpu/attention_codes.inl"

#include "kernels/cpu/matmul_int16.inl"

namespace moeflux::cpu {

extern const AttentionKernels avx512vnni_attention;
const AttentionKernels avx512vnni_attention = avx512vnni::code_attention;
extern const Int16Kernels avx512vnni_int16;
const Int16Kernels avx512vnni_int16 = avx512vnni::int16_kernels;

}  // namespace moeflux::cpu

#endif
