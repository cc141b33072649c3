// What the tiles of AMX are: eight registers of up to 16 rows of 64 bytes.
#pragma once

#include "kernels/cpu/simd.h"

namespace moeflux::cpu::MOEFLUX_ISA {

constexpr int64_t tile_rows = 16;
constexpr int64_t tile_bytes = 1024;

struct TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t zeros[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

}  // namespace moeflux::cpu::MOEFLUX_ISA
