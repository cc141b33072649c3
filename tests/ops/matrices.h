// Random matrices in every format, for the drivers of kernels.
#pragma once

#include "kernels/cpu/matmul.h"
#include "neon_checks.h"

namespace moeflux::cpu {
namespace {

// Plain where `bits` is 0.
Weights matrix_of(int bits, int64_t group, DType type, int64_t rows, int64_t columns) {
  const bool affine = bits > 0;
  const int64_t element = static_cast<int64_t>(dtype_bytes(type));
  Weights weights;
  weights.bits = bits;
  weights.group_size = group;
  weights.columns = columns;
  weights.element = affine ? DType::u32 : type;
  weights.scale_type = type;
  weights.code_stride = affine ? columns * bits / 8 : columns * element;
  weights.scale_stride = affine ? columns / group * element : 0;
  uint8_t* parts[3];
  for (int part = 0; part < 3; ++part) {
    const int64_t bytes = rows * (part == 0 ? weights.code_stride : weights.scale_stride);
    parts[part] = room<uint8_t>(bytes);
    if (part == 0 && affine) {
      for (int64_t i = 0; i < bytes; ++i) parts[part][i] = static_cast<uint8_t>(random_bits());
      continue;
    }
    // Finite in every type: the exponent's upper bits are those of numbers below 1.
    for (int64_t i = 0; i < bytes / element; ++i) {
      const float value = random_number();
      uint32_t wide;
      memcpy(&wide, &value, sizeof wide);
      if (type == DType::bf16) wide >>= 16;
      if (type == DType::f16) wide = (random_bits() & 0x83ffu) | 0x3400u;
      memcpy(parts[part] + i * element, &wide, static_cast<size_t>(element));
    }
  }
  weights.codes = parts[0];
  weights.scales = affine ? parts[1] : nullptr;
  weights.biases = affine ? parts[2] : nullptr;
  return weights;
}

// Where blocks of the type have f16 numbers: so many of them from a place on.
struct HalvesOfBlock {
  int64_t first;
  int64_t count;
};

HalvesOfBlock halves_of(BlockType type) {
  switch (type) {
    case BlockType::q2_k:
      return {80, 2};
    case BlockType::q3_k:
      return {108, 1};
    case BlockType::q6_k:
      return {208, 1};
    case BlockType::q4_1:
    case BlockType::q5_1:
    case BlockType::q4_k:
    case BlockType::q5_k:
      return {0, 2};
    default:
      return {0, 1};
  }
}

// Rows of so many blocks.
Weights matrix_of(const BlockShape& shape, int64_t rows, int64_t blocks) {
  Weights weights;
  weights.block = shape.type;
  weights.bits = shape.bits;
  weights.group_size = shape.group;
  weights.columns = blocks * shape.columns;
  weights.element = DType::u8;
  weights.code_stride = blocks * shape.bytes;
  uint8_t* memory = room<uint8_t>(rows * weights.code_stride);
  for (int64_t i = 0; i < rows * weights.code_stride; ++i) memory[i] = static_cast<uint8_t>(random_bits());
  const HalvesOfBlock halves = halves_of(shape.type);
  for (int64_t b = 0; b < rows * blocks; ++b) {
    uint8_t* block = memory + b * shape.bytes;
    if (shape.type == BlockType::mxfp4)
      block[0] = static_cast<uint8_t>(120 + random_bits() % 7);
    else
      for (int64_t i = 0; i < halves.count; ++i) block[halves.first + 2 * i + 1] &= 0xbf;  // finite
  }
  weights.codes = weights.scales = weights.biases = memory;
  return weights;
}

// Of codes that are floats: MXFP4, MXFP8, NVFP4 with scales of the rows and without, FP8.
constexpr Weights float_formats[] = {
    {.group_size = 32, .bits = 4, .element = DType::u32, .scale_type = DType::u8},
    {.group_size = 32, .bits = 8, .element = DType::u32, .scale_type = DType::u8},
    {.row_scale_bytes = 4, .group_size = 16, .bits = 4, .element = DType::u32, .scale_type = DType::f8_e4m3},
    {.group_size = 16, .bits = 4, .element = DType::u32, .scale_type = DType::f8_e4m3},
    {.group_size = 128, .bits = 8, .element = DType::f8_e4m3, .scale_type = DType::bf16},
    {.group_size = 128, .bits = 8, .element = DType::f8_e4m3, .scale_type = DType::f32},
};

Weights matrix_of(Weights weights, int64_t rows, int64_t columns) {
  const auto scale_bytes = static_cast<int64_t>(dtype_bytes(weights.scale_type));
  weights.columns = columns;
  weights.code_stride = weights.columns * weights.bits / 8;
  weights.scale_stride = weights.row_scale_bytes + weights.columns / weights.group_size * scale_bytes;
  uint8_t* codes = room<uint8_t>(rows * weights.code_stride);
  uint8_t* scales = room<uint8_t>(rows * weights.scale_stride);
  for (int64_t i = 0; i < rows * weights.code_stride; ++i) codes[i] = static_cast<uint8_t>(random_bits());
  for (int64_t i = 0; i < rows * weights.scale_stride; ++i) {
    const auto bits = static_cast<uint8_t>(random_bits());
    scales[i] = weights.scale_type == DType::u8 ? static_cast<uint8_t>(120 + bits % 7) : bits & 0xbf;  // finite
  }
  weights.codes = codes;
  weights.scales = weights.biases = scales;
  return weights;
}

}  // namespace
}  // namespace moeflux::cpu
