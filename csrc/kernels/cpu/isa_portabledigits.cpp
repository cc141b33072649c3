// Products of digits that every machine runs. The file has nothing else.
#define MOEFLUX_ISA portabledigits
#include "kernels/cpu/digits.inl"

namespace moeflux::cpu {

extern const DigitKernels portable_digits;
const DigitKernels portable_digits = portabledigits::digit_kernels;

}  // namespace moeflux::cpu
