// The choice of a format for products of whole numbers (see int16.h), by the kernels of one row or several.
#include "kernels/cpu/codes.h"
#include "kernels/cpu/int16.h"

namespace moeflux::cpu::MOEFLUX_ISA {

template <int bits>
static void multiply_codes(const Weights& w, int64_t first, int64_t last, const uint8_t* const* x, float* const* out,
                           int64_t n, const ReadNext& next) {
  if (w.group_size == 32) return multiply_rows<bits, 32>(w, first, last, x, out, n, next);
  if (w.group_size == 64) return multiply_rows<bits, 64>(w, first, last, x, out, n, next);
  return multiply_rows<bits, 128>(w, first, last, x, out, n, next);
}

static void multiply_int16(const Weights& weights, int64_t first, int64_t last, const uint8_t* const* x,
                           float* const* out, int64_t n, const ReadNext& next) {
  switch (weights.block) {
#define MOEFLUX_FOR_BLOCK(type)                                                                                       \
  case BlockType::type:                                                                                               \
    return multiply_rows<codes_in(BlockType::type), block_shape(BlockType::type).group>(weights, first, last, x, out, \
                                                                                        n, next)
    MOEFLUX_FOR_BLOCK(q8_0);
    MOEFLUX_FOR_BLOCK(q4_0);
    MOEFLUX_FOR_BLOCK(q4_1);
    MOEFLUX_FOR_BLOCK(q5_0);
    MOEFLUX_FOR_BLOCK(q5_1);
    MOEFLUX_FOR_BLOCK(q2_k);
    MOEFLUX_FOR_BLOCK(q3_k);
    MOEFLUX_FOR_BLOCK(q4_k);
    MOEFLUX_FOR_BLOCK(q5_k);
    MOEFLUX_FOR_BLOCK(q6_k);
    MOEFLUX_FOR_BLOCK(iq4_nl);
    MOEFLUX_FOR_BLOCK(iq4_xs);
    MOEFLUX_FOR_BLOCK(mxfp4);
#undef MOEFLUX_FOR_BLOCK
    case BlockType::none:
      break;
  }
  switch (weights.bits) {
    case 2:
      return multiply_codes<2>(weights, first, last, x, out, n, next);
    case 3:
      return multiply_codes<3>(weights, first, last, x, out, n, next);
    case 4:
      if (weights.scale_type == DType::u8) return multiply_rows<e2m1, 32>(weights, first, last, x, out, n, next);
      if (weights.scale_type == DType::f8_e4m3) return multiply_rows<e2m1, 16>(weights, first, last, x, out, n, next);
      return multiply_codes<4>(weights, first, last, x, out, n, next);
    case 5:
      return multiply_codes<5>(weights, first, last, x, out, n, next);
    case 6:
      return multiply_codes<6>(weights, first, last, x, out, n, next);
    default:
      return multiply_codes<8>(weights, first, last, x, out, n, next);
  }
}

constexpr Int16Kernels int16_kernels{convert_to_int16, multiply_int16};

}  // namespace moeflux::cpu::MOEFLUX_ISA
