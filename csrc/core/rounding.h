// Whole numbers, divided and rounded up. Kernels have their own: what they share must not be linked across instruction
// sets.
#pragma once

#include <cstdint>

namespace moeflux {

inline int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }
inline int64_t round_up(int64_t value, int64_t step) { return divide_up(value, step) * step; }

}  // namespace moeflux
