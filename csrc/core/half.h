// Conversions between f32 and the 16-bit floats of weight files.
#pragma once

#include <bit>
#include <cstdint>

namespace moeflux {

inline float bf16_to_f32(uint16_t half) { return std::bit_cast<float>(static_cast<uint32_t>(half) << 16); }

// Round to nearest, ties to even. A NaN stays one.
inline uint16_t f32_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

inline float f16_to_f32(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  uint32_t bits = (magnitude << 13) + 0x38000000u;  // the exponent's bias goes from 15 to 127
  if (magnitude >= 0x7c00u) bits = (magnitude << 13) | 0x7f800000u;
  if (magnitude < 0x400u)
    bits = std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  return std::bit_cast<float>(sign | bits);
}

// Round to nearest, ties to even; beyond 65519.99 to infinity. A NaN stays one.
inline uint16_t f32_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {
    // Subnormal: one step of 0.5f is 2^-24, so the addition itself rounds to the step of f16.
    const float rounded = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(rounded) - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13));
}

}  // namespace moeflux
