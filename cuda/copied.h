// Products of one row of x with tiles of matrices that lie in shared memory. From 9.0 on, copies bring the tiles there,
// and may be on their way before x is there; elsewhere plain loads do. Groups have 64 columns.
//
// A warp has the same parts of the columns in every tile, so it makes the digits of these parts alone, and holds them.
#pragma once
#include "products.h"

constexpr u32 copied_steps = 2;  // of a group

// How many blocks a multiprocessor shall have room for: with two, the next kernel's weights come while one works.
#if defined(MOEFLUX_GPU) && __CUDA_ARCH__ < 800
constexpr u32 copied_blocks = 1;
#else
constexpr u32 copied_blocks = 2;
#endif

// How a tile lies there: sixteen rows of codes, then their scales, then their biases. Each is a little longer than it
// has to be, so that the rows of a warp's load are in different banks.
struct TileShape {
  u32 row_bytes;
  u32 row_stride;
  u32 words;  // of a row's scales

  DEV u32 scale_stride() const { return 4 * (words + 4); }
  DEV u32 scales() const { return tile_rows * row_stride; }
  DEV u32 biases() const { return scales() + tile_rows * scale_stride(); }
  DEV u32 bytes() const { return copied_tile_bytes(row_bytes, row_stride - row_bytes, words); }
};
DEV TileShape tile_shape(u32 columns, u32 bits) {
  const u32 row = columns / pack * bits;
  return {row, row + 4 * copied_steps * bits, columns / part_columns};
}

// A row of a matrix where it is stored.
struct StoredRow {
  const u8* codes;
  const u8* scales;
  const u8* biases;
};
DEV StoredRow stored_row(const StoredMatrix& matrix, const TileShape& shape, u32 row) {
  const u64 scale = u64(row) * shape.words * 4;
  return {matrix.codes + u64(row) * shape.row_bytes, matrix.scales + scale, matrix.biases + scale};
}

DEV void bring_16(u8* to, const u8* from) {
#if defined(MOEFLUX_COPIES)
  copy_16(to, from);
#else
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
#endif
}
DEV void bring_word(u8* to, const u8* from) {
#if defined(MOEFLUX_COPIES)
  copy_word(to, from);
#else
  *reinterpret_cast<u32*>(to) = *reinterpret_cast<const u32*>(from);
#endif
}

// Places for tiles, and how they are filled.
struct TilePlaces {
  u8* first;
  u32 bytes;      // of a place
  u64* arrivals;  // one a place

  DEV u8* place(u32 i) const { return first + i * bytes; }

  // By one thread, before a barrier of the block.
  DEV static void prepare(u64* arrivals, u32 count) {
#if defined(MOEFLUX_COPIES)
    make_arrivals(arrivals, count);
#endif
  }
  // row_of(r) is row r of the tile. All threads.
  template <class RowOf>
  DEV void bring(const TileShape& shape, u32 i, RowOf row_of) const {
    u8* tile = place(i);
    const u32 warps = blockDim.x / lanes, scale_bytes = shape.words * 4;
#pragma unroll 1
    for (u32 r = warp_of(); r < tile_rows; r += warps) {
      const StoredRow row = row_of(r);
      u8* scales = tile + shape.scales() + r * shape.scale_stride();
      u8* biases = tile + shape.biases() + r * shape.scale_stride();
#pragma unroll 1
      for (u32 at = lane_of() * 16; at < shape.row_bytes; at += lanes * 16)
        bring_16(tile + r * shape.row_stride + at, row.codes + at);
      if (scale_bytes % 16 == 0) {  // by a half of the warp each
        const u32 half = lane_of() / (lanes / 2), lane = lane_of() % (lanes / 2);
#pragma unroll 1
        for (u32 at = lane * 16; at < scale_bytes; at += lanes / 2 * 16)
          bring_16((half ? biases : scales) + at, (half ? row.biases : row.scales) + at);
      } else {
#pragma unroll 1
        for (u32 at = lane_of() * 4; at < 2 * scale_bytes; at += lanes * 4)
          bring_word(at < scale_bytes ? scales + at : biases + at - scale_bytes,
                     at < scale_bytes ? row.scales + at : row.biases + at - scale_bytes);
      }
    }
#if defined(MOEFLUX_COPIES)
    arrive_with_copies(arrivals + i);
#endif
  }
  // Until place i is filled for the time that `turn` says, as for await_arrivals. All threads.
  DEV void await(u32 i, u32 turn) const {
#if defined(MOEFLUX_COPIES)
    await_arrivals(arrivals + i, turn & 1);
#else
    __syncthreads();
#endif
  }
};

// ---- x --------------------------------------------------------------------------------------------------------------

// Where a warp lays out digits, or numbers: of two parts.
typedef uint2 DigitStage[digits_of_number + 1][lanes];
static_assert(sizeof(DigitStage) == 2 * part_columns * sizeof(float), "numbers of two parts");

// What a lane needs of a part of x: lane (g, t) has digit g of its packs.
struct RowPart {
  uint2 digits[part_steps];
  DigitGroup groups[part_steps / copied_steps];
};

// The digits of one part or of two, a half of a warp each, to where the warp lays them out.
DEV DigitGroup stage_digits(const float (&numbers)[pack], DigitStage& stage) {
  DigitGroup group;
  const Digits made = digits_of(numbers, copied_steps, group);
  __syncwarp();
#pragma unroll
  for (u32 d = 0; d < digits_of_number; d++) stage[d][lane_of()] = made.of[d];
  __syncwarp();
  return group;
}
// What the lane needs of part p of these.
DEV RowPart staged_part(const DigitStage& stage, const DigitGroup& group, u32 p) {
  const u32 g = lane_of() / 4, t = lane_of() % 4;
  RowPart x;
#pragma unroll
  for (u32 j = 0; j < part_steps; j++)  // place_of_pack the other way round
    x.digits[j] = g < digits_of_number
                      ? stage[g][p * (lanes / 2) + (j / copied_steps * 4 + t) * copied_steps + j % copied_steps]
                      : make_uint2(0, 0);
#pragma unroll
  for (u32 i = 0; i < part_steps / copied_steps; i++) {
    x.groups[i].unit = __shfl_sync(everyone, group.unit, p * (lanes / 2) + i * 4 * copied_steps);
    x.groups[i].sum = __shfl_sync(everyone, group.sum, p * (lanes / 2) + i * 4 * copied_steps);
  }
  return x;
}
// Both: of one part each half of the warp brings the same packs.
template <u32 parts>
DEV void make_parts(const float (&numbers)[pack], DigitStage& stage, RowPart (&x)[parts]) {
  const DigitGroup group = stage_digits(numbers, stage);
#pragma unroll
  for (u32 p = 0; p < parts; p++) x[p] = staged_part(stage, group, p);
}

// The lane's pack of a part. x is aligned to 16 bytes.
DEV void pack_of_part(const float* x, u32 part, float (&numbers)[pack]) {
  const float4* from = reinterpret_cast<const float4*>(x + part * part_columns + lane_of() % (lanes / 2) * pack);
  const float4 low = from[0], high = from[1];
  numbers[0] = low.x, numbers[1] = low.y, numbers[2] = low.z, numbers[3] = low.w;
  numbers[4] = high.x, numbers[5] = high.y, numbers[6] = high.z, numbers[7] = high.w;
}

// A part for the lane's row, as part_of_row has it.
template <u32 bits>
DEV float part_of_x(const PartOfRows<bits, copied_steps>& part, const Storage& stored, const RowPart& x) {
  return part_of_row<bits, copied_steps>(
      part, stored, part_steps, [&](u32 j) { return x.digits[j]; }, [&](u32 group) { return x.groups[group]; });
}
// The same of a tile.
template <u32 bits>
DEV float part_of_tile(const u8* tile, const TileShape& shape, const Storage& stored, u32 part, const RowPart& x) {
  const u32 lane = lane_of(), g = lane / 4, own = g + (lane & 1) * 8;
  TwoRows<bits> rows;
#pragma unroll
  for (u32 i = 0; i < 2; i++) {
    rows.codes[i] = tile + (g + i * 8) * shape.row_stride;
    rows.scales[i] = tile + shape.scales() + own * shape.scale_stride();
    rows.biases[i] = tile + shape.biases() + own * shape.scale_stride();
  }
  PartOfRows<bits, copied_steps> of;
  of.load(rows, stored, part * part_steps, part_steps, true, false);
  return part_of_x<bits>(of, stored, x);
}

// The sum of a row's parts, in their order. `parts`: [part][row of the tile].
DEV float sum_of_parts(const float* parts, u32 count, u32 row) {
  float total = 0.0f;
#pragma unroll 4
  for (u32 part = 0; part < count; part++) total += parts[part * tile_rows + row];
  return total;
}
