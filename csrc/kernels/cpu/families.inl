// All families of kernels for one instruction set. Each .inl defines, in the namespace of the instruction set, the
// struct that its header declares: `constexpr MatmulKernels matmul_kernels` and so on.
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/simd.h"

#include "kernels/cpu/matmul.inl"

#include "kernels/cpu/elementwise.inl"

#include "kernels/cpu/attention.inl"

#include "kernels/cpu/selection.inl"

#include "kernels/cpu/delta.inl"

#include "kernels/cpu/hyper.inl"

#include "kernels/cpu/route.inl"

#include "kernels/cpu/choice.inl"

namespace moeflux::cpu::MOEFLUX_ISA {

constexpr Kernels kernels{matmul_kernels, elementwise_kernels, attention_kernels, selection_kernels,
                          delta_kernels,  hyper_kernels,       route_kernels,     choice_kernels};

}  // namespace moeflux::cpu::MOEFLUX_ISA
