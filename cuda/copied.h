// Products of one row of x with tiles of matrices that lie in shared memory. From 9.0 on, bulk copies bring the tiles
// there, and may be on their way before x is there; elsewhere plain loads do. Groups have 64 columns.
//
// A warp has the same two parts of the columns in every tile, so it makes the digits of these parts alone, and holds
// them.
#pragma once
#include "products.h"

constexpr u32 copied_steps = 2;  // of a group

// How many blocks a multiprocessor shall have room for: with two, the next kernel's weights come while one works.
#if defined(MOEFLUX_GPU) && __CUDA_ARCH__ < 800
constexpr u32 copied_blocks = 1;
#else
constexpr u32 copied_blocks = 2;
#endif

// How a tile lies there: sixteen rows of codes as they are stored, then their scales, then their biases. So one bulk
// copy of each matrix brings its codes. They are few on purpose: each takes some 40 ns of the chip's, however short it
// is.
struct TileShape {
  u32 row_bytes;
  u32 scale_bytes;  // of a row

  DEV u32 scales() const { return tile_rows * row_bytes; }
  DEV u32 biases() const { return scales() + tile_rows * scale_bytes; }
  DEV u32 bytes() const { return copied_tile_bytes(row_bytes, scale_bytes); }
};
DEV TileShape tile_shape(u32 columns, u32 bits) { return {columns / pack * bits, columns / part_columns * 4}; }

// As many rows of a matrix as a tile has, or half of them of each of two, from row `first` of `rows` on.
struct TileRows {
  TileShape shape;
  StoredMatrix matrix;
  StoredMatrix second;  // codes are null if there is none
  u32 first;
  u32 rows;
};

// Places for tiles, and how they are filled. Where there are more tiles than places, these are a power of two, and tile
// i has place i modulo that.
struct TilePlaces {
  u8* first;
  u32 bytes;  // of a place
  u32 count;
  u32 mask;
  u64* arrivals;  // one a place

  DEV u8* place(u32 i) const { return first + (i & mask) * bytes; }
  DEV u8* end() const { return first + count * bytes; }

  // By one thread, before a barrier of the block. For each tile, a warp arrives with its own copies, and one lane of it
  // with the bytes of the bulk copies.
  DEV void prepare() const {
#if defined(MOEFLUX_COPIES)
    make_arrivals(arrivals, count, lanes + 1);
#endif
  }
  // Whether one warp asks for a tile. Otherwise loads bring it, for which all warps are wanted.
#if defined(MOEFLUX_COPIES)
  static constexpr bool one_asks = true;
#else
  static constexpr bool one_asks = false;
#endif
  // Tiles `begin` to `end` - 1, of which rows_of(i) are the rows. All threads. Each tile has a warp that asks for it:
  // one lane for the codes, in bulk, and all lanes for the scales and biases, by sixteen bytes each.
  template <class RowsOf>
  DEV void bring(u32 begin, u32 end, RowsOf rows_of) const {
    bring(begin, end, rows_of, warp_of(), blockDim.x / lanes);
  }
  // The same by `warps` warps, of which the caller's is `warp`.
  template <class RowsOf>
  DEV void bring(u32 begin, u32 end, RowsOf rows_of, u32 warp, u32 warps) const {
#if defined(MOEFLUX_COPIES)
#pragma unroll 1
    for (u32 i = begin + warps - 1 - warp; i < end; i += warps) {
      const TileRows from = rows_of(i);
      const TileShape& shape = from.shape;
      const bool are_two = from.second.codes != nullptr;
      const u32 of_each = are_two ? tile_rows / 2 : tile_rows, here = min(of_each, from.rows - from.first);
      const u64 scale = u64(from.first) * shape.scale_bytes, code = u64(from.first) * shape.row_bytes;
      u8 *codes = place(i), *scales = codes + shape.scales();
      u64* arrival = arrivals + (i & mask);
      const u32 code_bytes = here * shape.row_bytes, scale_bytes = here * shape.scale_bytes;
      if (lane_of() == 0) {
        copy_in_bulk(codes, from.matrix.codes + code, code_bytes, arrival);
        if (are_two) copy_in_bulk(codes + of_each * shape.row_bytes, from.second.codes + code, code_bytes, arrival);
      }
      StoredMatrix matrix = from.matrix;
#pragma unroll 1
      for (u32 r = 0;; r += of_each) {
        const u8 *own_scales = matrix.scales + scale, *own_biases = matrix.biases + scale;
        u8 *to = scales + r * shape.scale_bytes, *to_biases = to + tile_rows * shape.scale_bytes;
#pragma unroll 1
        for (u32 at = lane_of() * 16; at + 16 <= scale_bytes; at += lanes * 16)
          copy_16(to + at, own_scales + at), copy_16(to_biases + at, own_biases + at);
#pragma unroll 1
        for (u32 at = scale_bytes / 16 * 16 + lane_of() * 4; at < scale_bytes; at += lanes * 4)  // of the last rows
          copy_4(to + at, own_scales + at), copy_4(to_biases + at, own_biases + at);
        // Rows behind the last are what a tile before has left there.
        may_be_anything(codes + r * shape.row_bytes + code_bytes, (of_each - here) * shape.row_bytes);
        may_be_anything(to + scale_bytes, (of_each - here) * shape.scale_bytes);
        may_be_anything(to_biases + scale_bytes, (of_each - here) * shape.scale_bytes);
        if (r > 0 || !are_two) break;
        matrix = from.second;
      }
      arrive_with_copies(arrival);
      if (lane_of() == 0) expect_bytes(arrival, (are_two ? 2 : 1) * code_bytes);
    }
#else
    for (u32 i = begin; i < end; i++) {
      const TileRows from = rows_of(i);
      const TileShape& shape = from.shape;
      const u32 of_each = from.second.codes ? tile_rows / 2 : tile_rows;
      for (u32 r = warp; r < tile_rows; r += warps) {  // one behind the last is taken to be the last
        const StoredMatrix& matrix = r < of_each ? from.matrix : from.second;
        const u32 row = min(from.first + r % of_each, from.rows - 1);
        const u8* codes = matrix.codes + u64(row) * shape.row_bytes;
        u8* to = place(i) + r * shape.row_bytes;
        for (u32 at = lane_of() * 16; at < shape.row_bytes; at += lanes * 16)
          *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(codes + at);
        for (u32 at = lane_of() * 4; at < shape.scale_bytes; at += lanes * 4) {
          const u64 scale = u64(row) * shape.scale_bytes + at;
          u8* scales = place(i) + shape.scales() + r * shape.scale_bytes + at;
          *reinterpret_cast<u32*>(scales) = *reinterpret_cast<const u32*>(matrix.scales + scale);
          *reinterpret_cast<u32*>(scales + tile_rows * shape.scale_bytes) =
              *reinterpret_cast<const u32*>(matrix.biases + scale);
        }
      }
    }
#endif
  }
  // Between what brings tiles and what awaits them. All threads.
  DEV void settle() const {
#if !defined(MOEFLUX_COPIES)
    __syncthreads();
#endif
  }
  // Until tile i is there.
  DEV void await(u32 i) const {
#if defined(MOEFLUX_COPIES)
    await_arrival(arrivals + (i & mask), (i & (mask + 1)) != 0);
#endif
  }
};

// What the tiles of a product of one row lie in, and the mask that goes with so many places.
DEV TilePlaces tile_places(void* room, u32 bytes, u32 count, u64* arrivals) {
  static_assert(copied_places == 8, "as the mask");
  const u32 mask = count > 4 ? 7 : count > 2 ? 3 : count - 1;
  return {static_cast<u8*>(room), made_once(bytes), count, made_once(mask), arrivals};
}

// ---- x --------------------------------------------------------------------------------------------------------------

// Where a warp lays out digits, or numbers: of two parts.
typedef uint2 DigitStage[digits_of_number + 1][lanes];
static_assert(sizeof(DigitStage) == copied_parts * part_columns * sizeof(float), "numbers of two parts");

// What a lane needs of a part of x. Of a tile's row, lane t of four takes packs 4 t ... 4 t + 3, so t = 0 and 1 have
// the first group, 2 and 3 the second. The tensor core keeps the groups apart because they are in columns of their own:
// 0 to 2 have the digits of the first group, 4 to 6 those of the second.
struct RowPart {
  uint2 digits[part_steps];
  DigitGroup group;  // that of the lane's packs
};

// The lane's pack of a part, a half of the warp each. x is aligned to 16 bytes.
DEV void pack_of_part(const float* x, u32 part, float (&numbers)[pack]) {
  const float4* from = reinterpret_cast<const float4*>(x + part * part_columns + lane_of() % (lanes / 2) * pack);
  const float4 low = from[0], high = from[1];
  numbers[0] = low.x, numbers[1] = low.y, numbers[2] = low.z, numbers[3] = low.w;
  numbers[4] = high.x, numbers[5] = high.y, numbers[6] = high.z, numbers[7] = high.w;
}

// The digits of every lane's pack, where all lanes find them, and the lane's own group.
DEV DigitGroup stage_digits(const float (&numbers)[pack], DigitStage& stage) {
  DigitGroup group;
  const Digits made = digits_of(numbers, copied_steps, group);
  __syncwarp();
#pragma unroll
  for (u32 d = 0; d < digits_of_number; d++) stage[d][lane_of()] = made.of[d];
  __syncwarp();
  return group;
}

// Both parts, whose packs the halves of the warp bring.
DEV void make_parts(const float (&numbers)[pack], DigitStage& stage, RowPart (&x)[copied_parts]) {
  const u32 g = lane_of() / 4, t = lane_of() % 4, digit = g % 4;
  const DigitGroup group = stage_digits(numbers, stage);
  const bool is_own = digit < digits_of_number && g / 4 == t / 2;
#pragma unroll
  for (u32 p = 0; p < copied_parts; p++) {
    const u32 first = p * (lanes / 2);
#pragma unroll
    for (u32 j = 0; j < part_steps; j++)
      x[p].digits[j] = is_own ? stage[digit][first + t * part_steps + j] : make_uint2(0, 0);
    x[p].group.unit = __shfl_sync(everyone, group.unit, first + t / 2 * (lanes / 4));
    x[p].group.sum = __shfl_sync(everyone, group.sum, first + t / 2 * (lanes / 4));
  }
}

// ---- The product ----------------------------------------------------------------------------------------------------

// Where a lane finds what it multiplies in every tile: its packs of rows g and g + 8, scale and bias of one of these
// rows, and its place among the sums. Of its warp's two parts the second is the first again if it is not there.
template <u32 bits>
struct LaneOfTile {
  u32 codes, to_second_row, to_second_part;
  u32 scale, to_bias, to_second_scale;
  u32 sum;
  u32 has_sum, has_second;

  DEV LaneOfTile(const TileShape& shape, u32 first_part, u32 all_parts) {
    const u32 g = lane_of() / 4, t = lane_of() % 4, first = min(first_part, all_parts - 1);
    const bool are_two = first_part + 1 < all_parts;
    codes = made_once(g * shape.row_bytes + (first * part_columns + t * part_steps * pack) / 8 * bits);
    to_second_row = made_once(8 * shape.row_bytes);
    to_second_part = made_once(are_two ? part_columns / 8 * bits : 0);
    scale = made_once(shape.scales() + (g + t % 2 * 8) * shape.scale_bytes + first * 4 + t / 2 * 2);
    to_bias = made_once(tile_rows * shape.scale_bytes);
    to_second_scale = made_once(are_two ? 4 : 0);
    sum = made_once(first * tile_rows + g + t % 2 * 8);
    has_sum = made_once(t >= 2 && first_part < all_parts);
    has_second = made_once(t >= 2 && are_two);
  }
};

// The sums of a part's codes with the digits: the lane has of rows g and g + 8 the columns 2 t and 2 t + 1. Of 4 bits
// they are sixteen times too large, because codes of odd columns stay four bits up.
template <u32 bits>
constexpr u32 times_too_large = bits == 4 ? 16 : 1;
template <u32 bits>
DEV void sums_of_part(const uint4 (&first)[bits / 4], const uint4 (&second)[bits / 4], const RowPart& x,
                      int (&sums)[4]) {
  int odd[4] = {};
#pragma unroll
  for (u32 i = 0; i < 4; i++) sums[i] = 0;
  if constexpr (bits == 4) {
    const auto low = [](u32 codes) { return codes & 0x0f0f0f0fu; };
    const auto high = [](u32 codes) { return codes & 0xf0f0f0f0u; };
    const uint4 a = first[0], b = second[0];
    multiply_bytes(sums, low(a.x), low(b.x), low(a.y), low(b.y), x.digits[0].x, x.digits[1].x);
    multiply_bytes(odd, high(a.x), high(b.x), high(a.y), high(b.y), x.digits[0].y, x.digits[1].y);
    multiply_bytes(sums, low(a.z), low(b.z), low(a.w), low(b.w), x.digits[2].x, x.digits[3].x);
    multiply_bytes(odd, high(a.z), high(b.z), high(a.w), high(b.w), x.digits[2].y, x.digits[3].y);
  } else {
    const auto evens = [](u32 a, u32 b) { return __byte_perm(a, b, 0x6420); };
    const auto odds = [](u32 a, u32 b) { return __byte_perm(a, b, 0x7531); };
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      const uint4 a = first[i], b = second[i];
      multiply_bytes(sums, evens(a.x, a.y), evens(b.x, b.y), odds(a.x, a.y), odds(b.x, b.y), x.digits[2 * i].x,
                     x.digits[2 * i].y);
      multiply_bytes(odd, evens(a.z, a.w), evens(b.z, b.w), odds(a.z, a.w), odds(b.z, b.w), x.digits[2 * i + 1].x,
                     x.digits[2 * i + 1].y);
    }
  }
#pragma unroll
  for (u32 i = 0; i < 4; i++) sums[i] = sums[i] * int(times_too_large<bits>) + odd[i];
}

// The warp's parts of a tile's rows, as part_of_row has them, to `parts`: [part][row of the tile].
template <u32 bits>
DEV void parts_of_tile(const u8* tile, const LaneOfTile<bits>& at, u32 number, const RowPart (&x)[copied_parts],
                       float* parts) {
  constexpr u32 quads = bits / 4;
  const bool is_second = lane_of() & 1;
  uint4 codes[copied_parts][2][quads];
  u32 stored[copied_parts][2];
#pragma unroll
  for (u32 p = 0; p < copied_parts; p++)
#pragma unroll
    for (u32 i = 0; i < 2; i++)
#pragma unroll
      for (u32 j = 0; j < quads; j++)
        codes[p][i][j] =
            reinterpret_cast<const uint4*>(tile + at.codes + i * at.to_second_row + p * at.to_second_part)[j];
#pragma unroll
  for (u32 p = 0; p < copied_parts; p++)
#pragma unroll
    for (u32 i = 0; i < 2; i++)
      stored[p][i] = *reinterpret_cast<const u16*>(tile + at.scale + i * at.to_bias + p * at.to_second_scale);
  Scaling by[copied_parts];
  if (number == number_bf16) {
#pragma unroll
    for (u32 p = 0; p < copied_parts; p++) by[p] = {bf16(u16(stored[p][0])), bf16(u16(stored[p][1]))};
  } else {
#pragma unroll
    for (u32 p = 0; p < copied_parts; p++) by[p] = {f16(u16(stored[p][0])), f16(u16(stored[p][1]))};
  }
  float out[copied_parts];
#pragma unroll
  for (u32 p = 0; p < copied_parts; p++) {
    int c[4];
    sums_of_part<bits>(codes[p][0], codes[p][1], x[p], c);
    // An even lane has s0 and s1 of its group in both rows, the odd one beside it has s2. Each keeps a row and sends
    // what is the other's.
    const int s01 = c[1] * 256 + c[0], other_s01 = c[3] * 256 + c[2];
    const int got = __shfl_xor_sync(everyone, is_second ? c[0] : other_s01, 1);
    const float total =
        fmaf(float(is_second ? c[2] : got), 65536.0f, float(is_second ? got : s01)) * (1.0f / times_too_large<bits>);
    const float before = __shfl_xor_sync(everyone, with_group(0.0f, total, by[p], x[p].group), 2);
    out[p] = with_group(before, total, by[p], x[p].group);
  }
  if (at.has_sum) parts[at.sum] = out[0];
  if (at.has_second) parts[at.sum + tile_rows] = out[1];
}

// The sum of a row's parts, in their order, and before them what there is. `parts`: [part][row of the tile].
DEV float sum_of_parts(const float* parts, u32 count, u32 row, float total = 0.0f) {
  constexpr u32 together = 8;  // that are loaded before any is added
  u32 part = 0;
#pragma unroll 1
  for (; part + together <= count; part += together) {
    float some[together];
#pragma unroll
    for (u32 j = 0; j < together; j++) some[j] = parts[(part + j) * tile_rows + row];
#pragma unroll
    for (u32 j = 0; j < together; j++) total += some[j];
  }
#pragma unroll 1
  for (; part < count; part++) total += parts[part * tile_rows + row];
  return total;
}
