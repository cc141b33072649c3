// Tiles of matrices that come to shared memory for one warp, which takes each through all columns by itself: so no warp
// waits for another, and sums stay in registers. Groups have 64 columns.
#pragma once
#include "copied.h"

constexpr u32 stage_row_bytes = stage_bytes / tile_rows;  // a line of each row
constexpr u32 scaled_parts = 4;                           // whose scales come together: sixteen bytes of each row
static_assert(scaled_parts * 4 * tile_rows * 2 == stage_scale_bytes, "scales and biases");

// A tile has its rows from row `first` of the matrix on, or half as many of each of two.
struct StreamedTile {
  StoredMatrix matrix;
  StoredMatrix second;
  u32 first;
};

// Lanes read eight or sixteen bytes of each of several rows at a time. So that these are in different banks, the pieces
// of sixteen bytes of a row change places with each other.
template <u32 bits>
DEV u32 turn_of(u32 row) {
  return bits == 4 ? row % 4 * 2 : row % 2 * 4;
}
DEV u32 scales_of(u32 row) { return (row ^ row / 8 * 4) * 16; }

// A stage has a line of each row of a tile: one or two parts of the columns. They come by copies of sixteen bytes a
// lane to a ring of the warp's own, several stages ahead, from one tile on to the next. Their scales come at every
// fourth part, those of the rows first, then their biases.
template <u32 bits, bool is_double>
struct TileStream {
  static constexpr u32 stage_parts = stage_row_bytes * 8 / bits / part_columns;
  static constexpr u32 scaled_stages = scaled_parts / stage_parts;
  static constexpr u32 of_each = is_double ? tile_rows / 2 : tile_rows;
  static constexpr u32 pieces = tile_rows * stage_row_bytes / (lanes * 16);  // of a stage, that a lane copies

  u8* ring;
  u8* scale_ring;
  u32 parts, stages, row_bytes;
  // What comes next: of the lane's rows, and where it belongs.
  const u8* from[pieces];
  const u8* from_scales;
  u32 to[2], to_scales;
  u32 stage, place, scale_place;
  bool follows;          // whether the next tile is of the same matrix as the one before
  u32 jump, scale_jump;  // bytes to it, from where that ends
  // What is taken next.
  u32 taken_place, taken_scales;

  // Of tiles of a matrix it has each of number `apart`.
  DEV TileStream(void* room, u32 columns, u32 apart) {
    const u32 lane = lane_of();
    ring = static_cast<u8*>(room);
    scale_ring = ring + stream_stages * stage_bytes;
    parts = columns / part_columns;
    stages = (parts + stage_parts - 1) / stage_parts;
    row_bytes = columns / 8 * bits;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      const u32 row = lane / 8 + 4 * i;
      to[i] = made_once(row * stage_row_bytes + (lane % 8 ^ turn_of<bits>(row)) * 16);
    }
    to_scales = made_once(lane / tile_rows * (stage_scale_bytes / 2) + scales_of(lane % tile_rows));
    stage = place = scale_place = taken_place = taken_scales = 0;
    follows = false;
    jump = made_once(apart * of_each * row_bytes - stages * stage_row_bytes);
    scale_jump =
        made_once(apart * of_each * parts * 4 - (stages + scaled_stages - 1) / scaled_stages * scaled_parts * 4);
  }

  DEV static u32 behind(u32 place) { return place == (stream_stages - 1) * stage_bytes ? 0 : place + stage_bytes; }

  // Asks for the next stage, if there is one. Where a tile begins of another matrix, tile_of() is it. All lanes.
  template <class TileOf>
  DEV void ask(bool is_there, TileOf tile_of) {
    if (is_there) {
      const u32 lane = lane_of(), piece = lane % 8, scale_row = lane % tile_rows, scale_bytes = parts * 4;
      if (stage == 0 && follows) {
#pragma unroll
        for (u32 i = 0; i < pieces; i++) from[i] += jump;
        from_scales += scale_jump;
      } else if (stage == 0) {
        const StreamedTile tile = tile_of();
        const StoredMatrix &one = tile.matrix, &other = is_double ? tile.second : tile.matrix;
#pragma unroll
        for (u32 i = 0; i < pieces; i++) {
          const u32 row = tile.first + (lane / 8 + 4 * i) % of_each;
          from[i] = (4 * i < of_each ? one : other).codes + u64(row) * row_bytes + piece * 16;
        }
        const u8* own = lane < tile_rows ? one.scales : one.biases;
        if (is_double && scale_row >= of_each) own = lane < tile_rows ? other.scales : other.biases;
        from_scales = own + u64(tile.first + scale_row % of_each) * scale_bytes;
      }
      if (stage % scaled_stages == 0) {
        u8* at = scale_ring + scale_place + to_scales;
        if (scale_bytes % 16 == 0) {
          copy_16(at, from_scales);
        } else {  // behind the last part is the last again
          const u32 last = parts - 1 - stage * stage_parts;
#pragma unroll
          for (u32 i = 0; i < scaled_parts; i++) copy_4(at + i * 4, from_scales + min(i, last) * 4);
        }
        from_scales += scaled_parts * 4;
        scale_place = (scale_place + stage_scale_bytes) % stream_scale_bytes;
      }
      if (stage * stage_row_bytes + piece * 16 < row_bytes) {
#pragma unroll
        for (u32 i = 0; i < pieces; i++)
          copy_16(ring + place + to[i % 2] + i / 2 * (tile_rows / 2 * stage_row_bytes), from[i]);
      }
#pragma unroll
      for (u32 i = 0; i < pieces; i++) from[i] += stage_row_bytes;
      stage = stage + 1 == stages ? 0 : stage + 1;
    }
    place = behind(place);
    end_of_copies();  // there is a group for each stage, even if none is left
  }

  // Until the next stage is there. Then the one before may be copied over: the warp asks for another.
  DEV void await() const {
    wait_for_copies<stream_stages - 2>();
    __syncwarp();
  }
  // Where stage `i` of the tile is that is taken, and its scales.
  DEV const u8* take(u32 i, const u8*& scales) {
    const u8* codes = ring + taken_place;
    const u32 within = i % scaled_stages;
    taken_place = behind(taken_place);
    scales = scale_ring + taken_scales + within * (stage_parts * 4);
    if (within == scaled_stages - 1 || i + 1 == stages)
      taken_scales = (taken_scales + stage_scale_bytes) % stream_scale_bytes;
    return codes;
  }
  // Those of a row, of each part of a stage.
  DEV static void scales_at(const u8* stored, u32 (&scales)[stage_parts]) {
    if constexpr (stage_parts == 2) {
      const uint2 both = *reinterpret_cast<const uint2*>(stored);
      scales[0] = both.x, scales[1] = both.y;
    } else {
      scales[0] = *reinterpret_cast<const u32*>(stored);
    }
  }
};
