// Beside simd.h, for the same translation units: packed codes to bytes, in the order of the columns.
#pragma once

#include "core/block_types.h"
#include "core/dtype.h"
#include "kernels/cpu/simd.h"

namespace moeflux::cpu::MOEFLUX_ISA {

constexpr int64_t stretch = 32;  // columns that are taken apart together

// What codes are, beside so many bits: of four bits, and floats; or those of a type of blocks.
constexpr int e2m1 = 20;
constexpr int codes_in(BlockType type) { return 100 + static_cast<int>(type); }
constexpr bool are_in_blocks(int codes) { return codes > 100; }
constexpr BlockType block_type_of(int codes) { return static_cast<BlockType>(codes - 100); }

constexpr int width_of(int codes) {
  if (are_in_blocks(codes)) return block_shape(block_type_of(codes)).bits;
  return codes == e2m1 ? 4 : codes;
}

// Bytes of a row that hold 128 columns; of blocks of 256, half a block.
constexpr int64_t bytes_of_128(int codes) {
  if (!are_in_blocks(codes)) return 16 * width_of(codes);
  const BlockShape& shape = block_shape(block_type_of(codes));
  return 128 * shape.bytes / shape.columns;
}

constexpr uint64_t low_bits(int count) { return (uint64_t{1} << count) - 1; }
constexpr uint64_t in_both_halves(uint64_t half, int half_bits) { return half | half << half_bits; }

constexpr int64_t scale_bytes_of(DType type) { return static_cast<int64_t>(dtype_bytes(type)); }

// Half the power of two of which these are the exponents, where an f32 has them.
MOEFLUX_INLINE Floats half_power(Words bits) {
  const Words least = Words{} + 0x00400000u;  // 2^-127, which has no exponent of its own
  return (Floats)(bits > least ? bits : least) * 0.5f;
}

MOEFLUX_INLINE Floats half_powers(Words exponents) { return half_power(exponents << 23); }

// Numbers E4M3, whose bits are the same as those of a 256th in f16, but for leading zeros of the exponent. 127 and 255,
// which stand for none, become 480 and -480.
MOEFLUX_INLINE Floats from_e4m3(Words bytes) {
  return from_f16(narrow((bytes & 0x80u) << 8 | (bytes & 0x7fu) << 7)) * 256.0f;
}

// 32 codes, one per byte. Eight of them are spread over a 64-bit word in three steps. Each step moves the upper half of
// the codes that are still together.
template <int bits>
MOEFLUX_INLINE void codes_to_bytes(const uint8_t* from, uint8_t (&codes)[stretch]) {
  typedef uint64_t Longs __attribute__((vector_size(lanes >= 8 ? 32 : 16)));
  constexpr int64_t longs = sizeof(Longs) / 8;
  constexpr uint64_t four = low_bits(4 * bits);
  constexpr uint64_t two = in_both_halves(low_bits(2 * bits), 32);
  constexpr uint64_t one = in_both_halves(in_both_halves(low_bits(bits), 16), 32);
  for (int64_t part = 0; part < 4 / longs; ++part) {
    Longs value;
    for (int64_t i = 0; i < longs; ++i) {
      const int64_t offset = (part * longs + i) * bits;
      const int64_t at = offset < 4 * bits - 8 ? offset : 4 * bits - 8;  // no byte after the 32 codes is read
      uint64_t word;
      __builtin_memcpy(&word, from + at, 8);
      value[i] = word >> (8 * (offset - at));
    }
    value = (value & four) | ((value << (32 - 4 * bits)) & (four << 32));
    value = (value & two) | ((value << (16 - 2 * bits)) & (two << 16));
    value = (value & one) | ((value << (8 - bits)) & (one << 8));
    store(codes + part * longs * 8, value);
  }
}

}  // namespace moeflux::cpu::MOEFLUX_ISA
