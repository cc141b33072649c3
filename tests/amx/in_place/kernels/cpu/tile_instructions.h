// In place of the file of this name in csrc: the same instructions in software.
#pragma once

#include "kernels/cpu/tile_shapes.h"
#include "tiles.h"

namespace moeflux::cpu::MOEFLUX_ISA {

inline void shape_tiles(const TileShapes& shapes) { tiles::configure(&shapes); }
inline void release_tiles() { tiles::release(); }

template <int tile>
void zero_tile() {
  tiles::zero(tile);
}

template <int tile>
void load_tile(const void* from, int64_t stride) {
  tiles::load(tile, from, stride);
}

template <int tile>
void store_tile(void* to, int64_t stride) {
  tiles::store(tile, to, stride);
}

template <int sums, int codes, int digits>
void dot_tiles() {
  tiles::dot_bytes<uint8_t, int8_t>(sums, codes, digits);
}

template <int sums, int a, int b>
void dot_tiles_bf16() {
  tiles::dot_bf16(sums, a, b);
}

}  // namespace moeflux::cpu::MOEFLUX_ISA
