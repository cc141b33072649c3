// Products of matrices as stored with rows of f32, exact as far as that goes.
//
// An affine weight is code * scale + bias. A group of columns shares scale and bias, and its x becomes whole numbers of
// 22 bits and a sign that share a power of two, `unit`. Such a number is three digits, each a signed byte. So a group's
// sums of code times digit are whole numbers below 2^23, exact in whatever order a tensor core adds them, and every way
// to make them gives the same bits. What follows has one order:
//
//   t = s2 * 2^16 + (s1 * 2^8 + s0)          of the sums with the three digits: the bracket is a whole number, rounded
//   part += (scale * t + bias * sum) * unit  groups in the order of the columns, within a part of 128 columns;
//                                            `sum` is that of the group's whole numbers
//   out += part                              parts in the order of the columns
//
// A group of x that has a NaN or an infinity makes NaN of every output.
#pragma once
#include "basics.h"

// ---- x as digits ----------------------------------------------------------------------------------------------------

// Where a lane finds the digits of its pack: a step is 32 columns, a pack of each of four lanes. Within a group of
// `group_steps` steps, lane t of the four has packs t * group_steps ... in its steps, so that its codes lie together.
struct PackPlace {
  u32 step;
  u32 lane;
};
DEV PackPlace place_of_pack(u32 index, u32 group_steps) {
  const u32 packs = 4 * group_steps, within = index % packs;
  return {index / packs * group_steps + within % group_steps, within / group_steps};
}

// Each digit of eight numbers: x for the even ones, y for the odd.
struct Digits {
  uint2 of[digits_of_number];
};

DEV u32 bytes_together(u32 a, u32 b, u32 c, u32 d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// A warp makes digits of 256 columns, a pack a lane: `x` are the lane's numbers, 0 behind the last column.
DEV Digits digits_of(const float (&x)[pack], u32 group_steps, DigitGroup& group) {
  u32 most = 0;  // without signs, bits are in the order of the numbers
#pragma unroll
  for (u32 i = 0; i < pack; i++) most = max(most, __float_as_uint(x[i]) & 0x7fffffffu);
  for (u32 distance = 2 * group_steps; distance > 0; distance /= 2)
    most = max(most, __shfl_xor_sync(everyone, most, distance));
  const bool is_finite = most < 0x7f800000u;
  const u32 exponent = max(most >> 23, 22u);  // `up` takes the largest to 2^21 ... 2^22
  const float up = is_finite ? __uint_as_float((275u - exponent) << 23) : 0.0f;
  group.unit = is_finite ? __uint_as_float((exponent - 21u) << 23) : __uint_as_float(0x7fc00000u);
  int own[pack], sum = 0;
#pragma unroll
  for (u32 i = 0; i < pack; i++) {
    own[i] = __float2int_rn(x[i] * up);
    sum += own[i];
  }
  for (u32 distance = 2 * group_steps; distance > 0; distance /= 2) sum += __shfl_xor_sync(everyone, sum, distance);
  group.sum = float(sum);
  Digits digits;
#pragma unroll
  for (u32 d = 0; d < digits_of_number; d++) {
    digits.of[d].x = bytes_together(u32(own[0]), u32(own[2]), u32(own[4]), u32(own[6]));
    digits.of[d].y = bytes_together(u32(own[1]), u32(own[3]), u32(own[5]), u32(own[7]));
#pragma unroll
    for (u32 i = 0; i < pack; i++) own[i] = (own[i] + 128) >> 8;  // what is left when the signed byte is gone
  }
  return digits;
}

DEV void pack_of_x(const float* x, u32 first, u32 columns, float (&numbers)[pack]) {
  if (first < columns && reinterpret_cast<u64>(x) % 16 == 0) {
    const float4 low = reinterpret_cast<const float4*>(x + first)[0],
                 high = reinterpret_cast<const float4*>(x + first)[1];
    numbers[0] = low.x, numbers[1] = low.y, numbers[2] = low.z, numbers[3] = low.w;
    numbers[4] = high.x, numbers[5] = high.y, numbers[6] = high.z, numbers[7] = high.w;
    return;
  }
#pragma unroll
  for (u32 i = 0; i < pack; i++) numbers[i] = first < columns ? x[first + i] : 0.0f;
}

// ---- Codes ----------------------------------------------------------------------------------------------------------

// The codes of a pack as they are stored, and as bytes: x has those of the even columns, y those of the odd ones.
template <u32 bits>
struct Codes {
  static constexpr u32 words = bits == 4 || bits == 2 ? 1 : 2;
  u32 of[words];

  DEV uint2 bytes() const {
    if constexpr (bits == 4) {
      return make_uint2(of[0] & 0x0f0f0f0fu, of[0] >> 4 & 0x0f0f0f0fu);
    } else if constexpr (bits == 8) {
      return make_uint2(__byte_perm(of[0], of[1], 0x6420), __byte_perm(of[0], of[1], 0x7531));
    } else if constexpr (bits == 2) {
      const u32 spread = (of[0] | of[0] << 8) & 0x00ff00ffu, nibbles = (spread | spread << 4) & 0x0f0f0f0fu;
      return make_uint2(nibbles & 0x03030303u, nibbles >> 2 & 0x03030303u);
    } else {
      const u64 word = u64(of[1]) << 32 | of[0];
      constexpr u32 mask = (1u << bits) - 1;
      uint2 codes = make_uint2(0, 0);
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        codes.x |= (u32(word >> (bits * (2 * i))) & mask) << (8 * i);
        codes.y |= (u32(word >> (bits * (2 * i + 1))) & mask) << (8 * i);
      }
      return codes;
    }
  }
};

template <u32 bits>
DEV Codes<bits> codes_at(const u8* from) {
  Codes<bits> codes;
  if constexpr (bits == 4) {
    codes.of[0] = *reinterpret_cast<const u32*>(from);
  } else if constexpr (bits == 8) {
    codes.of[0] = reinterpret_cast<const u32*>(from)[0];
    codes.of[1] = reinterpret_cast<const u32*>(from)[1];
  } else if constexpr (bits == 2) {
    codes.of[0] = *reinterpret_cast<const u16*>(from);
  } else {
    u64 word = 0;
#pragma unroll
    for (u32 i = 0; i < bits; i++) word |= u64(from[i]) << (8 * i);
    codes.of[0] = u32(word);
    codes.of[1] = u32(word >> 32);
  }
  return codes;
}

// Of `count` packs that lie together, aligned to their size.
template <u32 bits, u32 count>
DEV void codes_together(const u8* from, Codes<bits> (&codes)[count]) {
  if constexpr (bits == 4 && count == 2) {
    const uint2 both = *reinterpret_cast<const uint2*>(from);
    codes[0].of[0] = both.x, codes[1].of[0] = both.y;
  } else if constexpr (bits == 4 && count == 4) {
    const uint4 all = *reinterpret_cast<const uint4*>(from);
    codes[0].of[0] = all.x, codes[1].of[0] = all.y, codes[2].of[0] = all.z, codes[3].of[0] = all.w;
  } else if constexpr (bits == 8 && count == 2) {
    const uint4 all = *reinterpret_cast<const uint4*>(from);
    codes[0].of[0] = all.x, codes[0].of[1] = all.y, codes[1].of[0] = all.z, codes[1].of[1] = all.w;
  } else {
#pragma unroll
    for (u32 j = 0; j < count; j++) codes[j] = codes_at<bits>(from + j * bits);
  }
}

// How a matrix is stored.
struct Storage {
  u32 columns;
  u32 group_steps;
  u32 number;  // the type of elements, or of scales and biases

  DEV u32 steps() const { return columns / step_columns; }
  DEV u32 groups() const { return steps() / group_steps; }
  DEV u32 parts() const { return (columns + part_columns - 1) / part_columns; }
};

// Two rows of a matrix, or one of each of two.
template <u32 bits>
struct TwoRows {
  const u8* codes[2];
  const u8* scales[2];
  const u8* biases[2];

  DEV void set(u32 i, const Storage& stored, const StoredMatrix& matrix, u64 row) {
    const u64 scale = row * stored.groups() * bytes_of(stored.number);
    codes[i] = matrix.codes + row * (stored.columns / pack * bits);
    scales[i] = matrix.scales + scale;
    biases[i] = matrix.biases + scale;
  }
};

DEV float total_of_digits(int s0, int s1, int s2) { return fmaf(float(s2), 65536.0f, float(s1 * 256 + s0)); }
DEV float with_group(float part, float total, float scale, float bias, const DigitGroup& group) {
  return fmaf(fmaf(scale, total, bias * group.sum), group.unit, part);
}

// A number as it is stored, so that what loads it need not wait for it.
DEV u32 stored_number(const u8* numbers, u64 i, u32 type) {
  if (type == number_f32) return reinterpret_cast<const u32*>(numbers)[i];
  return reinterpret_cast<const u16*>(numbers)[i];
}
DEV float number_of(u32 bits, u32 type) {
  return type == number_bf16 ? bf16(u16(bits)) : type == number_f16 ? f16(u16(bits)) : __uint_as_float(bits);
}

// What a lane needs of a part of two rows: its packs of each, and scale and bias of each group. A kernel loads it long
// before it multiplies. `steps` are those of a group, 0 where the kernel is for all: a part has at most `most` groups.
template <u32 bits, u32 steps>
struct PartOfRows {
  static constexpr u32 most = steps ? part_steps / steps : part_steps;
  Codes<bits> codes[2][part_steps];  // in the order of groups, then of the lane's packs
  u32 scales[2][most];
  u32 biases[2][most];

  // Of rows 0 and 1 the scales are loaded if `first` and `second` say so. Steps from `step` on, `count` of them.
  DEV void load(const TwoRows<bits>& rows, const Storage& stored, u32 step, u32 count, bool first, bool second) {
    const u32 t = lane_of() % 4, of_group = steps ? steps : stored.group_steps;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      if constexpr (steps > 0) {
#pragma unroll
        for (u32 j = 0; j < most; j++) {
          Codes<bits> some[steps];
          if (j * steps < count) {
            codes_together<bits, steps>(rows.codes[i] + u64((step + j * steps) * 4 + t * steps) * bits, some);
#pragma unroll
            for (u32 k = 0; k < steps; k++) codes[i][j * steps + k] = some[k];
          }
        }
      } else {
#pragma unroll
        for (u32 j = 0; j < part_steps; j++)
          if (j < count)
            codes[i][j] = codes_at<bits>(
                rows.codes[i] + u64((step + j / of_group * of_group) * 4 + t * of_group + j % of_group) * bits);
      }
      if (i == 0 ? !first : !second) continue;
#pragma unroll
      for (u32 j = 0; j < most; j++)
        if (j * of_group < count) {
          scales[i][j] = stored_number(rows.scales[i], step / of_group + j, stored.number);
          biases[i][j] = stored_number(rows.biases[i], step / of_group + j, stored.number);
        }
    }
  }
};

// ---- One row of x ---------------------------------------------------------------------------------------------------

// What a block shares: the digits of as many columns as there is room for, and the parts of its outputs, of one tile
// and of the next.
struct OneRow {
  uint2 digits[slab_parts * part_steps][digits_of_number * 4];  // [step][digit, lane of four]
  DigitGroup groups[slab_parts * part_steps];
  float parts[2][slab_parts][tile_rows];
};

// Steps first ... first + count - 1 of x into shared memory. All threads.
DEV void bring_digits(const float* x, const Storage& stored, u32 first, u32 count, OneRow& shared) {
  const u32 packs = count * 4;
  for (u32 base = warp_of() * lanes; base < packs; base += blockDim.x) {
    const u32 index = base + lane_of();
    float numbers[pack];
    pack_of_x(x + first * step_columns, index * pack, count * step_columns, numbers);
    DigitGroup group;
    const Digits digits = digits_of(numbers, stored.group_steps, group);
    if (index >= packs) continue;
    const PackPlace at = place_of_pack(index, stored.group_steps);
#pragma unroll
    for (u32 d = 0; d < digits_of_number; d++) shared.digits[at.step][d * 4 + at.lane] = digits.of[d];
    if (at.lane == 0 && at.step % stored.group_steps == 0) shared.groups[at.step / stored.group_steps] = group;
  }
}

// One part of the lane's row g (lane t = 0 of four) or g + 8 (t = 1). `from`: its first step in shared memory.
template <u32 bits, u32 steps>
DEV float part_of_one(const PartOfRows<bits, steps>& part, const Storage& stored, u32 from, u32 count,
                      const OneRow& shared) {
  const u32 lane = lane_of(), g = lane / 4, t = lane % 4, of_group = steps ? steps : stored.group_steps;
  const bool is_second = t & 1;
  float sum = 0.0f;
  int c[4] = {};
#pragma unroll
  for (u32 j = 0; j < part_steps; j++) {
    if (j >= count) break;
    const uint2 first = part.codes[0][j].bytes(), second = part.codes[1][j].bytes();
    const uint2 x = g < digits_of_number ? shared.digits[from + j][g * 4 + t] : make_uint2(0, 0);
    multiply_bytes(c, first.x, second.x, first.y, second.y, x.x, x.y);
    if ((j + 1) % of_group != 0) continue;
    // Lane t = 0 has s0 and s1 of both rows, lane t = 1 has s2. Each keeps its row and sends what is the other's.
    const int s01 = c[1] * 256 + c[0], other_s01 = c[3] * 256 + c[2];
    const int got = __shfl_xor_sync(everyone, is_second ? c[0] : other_s01, 1);
    const float total = fmaf(float(is_second ? c[2] : got), 65536.0f, float(is_second ? got : s01));
    const u32 group = steps ? j / steps : j / of_group;
    u32 scale = 0, bias = 0;
#pragma unroll
    for (u32 i = 0; i < PartOfRows<bits, steps>::most; i++)
      if (i == group) scale = part.scales[0][i], bias = part.biases[0][i];
    sum = with_group(sum, total, number_of(scale, stored.number), number_of(bias, stored.number),
                     shared.groups[from / of_group + group]);
    c[0] = c[1] = c[2] = c[3] = 0;
  }
  return sum;
}

// Tiles of sixteen outputs of one row of x, for a block: count of them. rows_of(i) are the two rows of the lane in
// tile i, and out(i, row, sum) takes the sums, in the first warp: lanes below tile_rows have one. What the first parts
// need is loaded before x is there, and what the next needs before a part is multiplied.
template <u32 bits, u32 steps, class RowsOf, class WaitForX, class Out>
DEV void outputs_of_one(const Storage& stored, const float* x, u32 count, OneRow& shared, RowsOf rows_of,
                        WaitForX wait_for_x, Out out) {
  const u32 lane = lane_of(), g = lane / 4, t = lane % 4, warps = blockDim.x / lanes;
  constexpr u32 slab_steps = slab_parts * part_steps;
  // A lane's own scales are those of row g, or of row g + 8.
  const auto load = [&](PartOfRows<bits, steps>& part, u32 tile, u32 step, u32 end) {
    TwoRows<bits> rows = rows_of(tile);
    if (t & 1) rows.scales[0] = rows.scales[1], rows.biases[0] = rows.biases[1];
    part.load(rows, stored, step, min(part_steps, end - step), true, false);
  };
  PartOfRows<bits, steps> next;
  const u32 first_step = warp_of() * part_steps;
  if (count > 0 && first_step < min(slab_steps, stored.steps()))
    load(next, 0, first_step, min(slab_steps, stored.steps()));
  wait_for_x();
  for (u32 tile = 0; tile < count; tile++) {
    float total = 0.0f;
    for (u32 first = 0; first < stored.steps(); first += slab_steps) {
      const u32 slab = first / slab_steps, slabs = (stored.steps() + slab_steps - 1) / slab_steps;
      const u32 end = min(first + slab_steps, stored.steps()), parts = (end - first + part_steps - 1) / part_steps;
      float (&sums)[slab_parts][tile_rows] = shared.parts[(tile * slabs + slab) % 2];
      if (tile == 0 || slabs > 1) {
        if (tile > 0 || slab > 0) __syncthreads();
        bring_digits(x, stored, first, end - first, shared);
        __syncthreads();
      }
      for (u32 part = warp_of(); part < parts; part += warps) {
        const PartOfRows<bits, steps> now = next;
        const u32 from = part * part_steps;
        if (part + warps < parts) {
          load(next, tile, first + from + warps * part_steps, end);
        } else if (slab + 1 < slabs) {
          if (end + first_step < stored.steps())
            load(next, tile, end + first_step, min(end + slab_steps, stored.steps()));
        } else if (tile + 1 < count) {
          load(next, tile + 1, first_step, min(slab_steps, stored.steps()));
        }
        const float sum = part_of_one<bits, steps>(now, stored, from, min(part_steps, end - first - from), shared);
        if (t < 2) sums[part][g + t * 8] = sum;
      }
      __syncthreads();
      if (threadIdx.x < tile_rows)
        for (u32 part = 0; part < parts; part++) total += sums[part][threadIdx.x];
    }
    if (threadIdx.x < lanes) out(tile, threadIdx.x, total);
  }
}

// ---- Several rows of x ----------------------------------------------------------------------------------------------

// Digits lie as the tensor core takes them: of eight rows together, [step][digit][lane], and their groups [group][row].
DEV u64 digits_at(u64 block, u32 steps, u32 step, u32 digit) {
  return ((block * steps + step) * digits_of_number + digit) * lanes;
}

// What a block shares: the parts that its warps have just made, and the sums of those before.
template <u32 fragments>
struct SomeRows {
  float parts[product_warps][tile_rows][fragments * fragment_rows + 1];
  float totals[tile_rows][fragments * fragment_rows];
};

// One part of sixteen rows of the matrix and the rows of x of all fragments, into shared memory. Of the rows of x,
// `present` are there; the digits of others are taken to be zeros.
template <u32 bits, u32 steps, u32 fragments>
DEV void part_of_some(const PartOfRows<bits, steps>& part, const Storage& stored, const uint2* digits,
                      const DigitGroup* groups, u64 block, u32 present, u32 step, u32 count,
                      float (&parts)[tile_rows][fragments * fragment_rows + 1]) {
  const u32 lane = lane_of(), g = lane / 4, t = lane % 4, of_group = steps ? steps : stored.group_steps;
  float sums[fragments][4] = {};
  int c[fragments][digits_of_number][4] = {};
  const auto load = [&](u32 j, u32 f, uint2(&x)[digits_of_number]) {
#pragma unroll
    for (u32 d = 0; d < digits_of_number; d++)
      x[d] = j < count && f * fragment_rows + g < present
                 ? digits[digits_at(block + f, stored.steps(), step + j, d) + lane]
                 : make_uint2(0, 0);
  };
  const auto groups_of = [&](u32 f, u32 group) {
    return *reinterpret_cast<const float4*>(
        groups + ((block + f) * stored.groups() + step / of_group + group) * fragment_rows + 2 * t);
  };
  // One fragment's digits and groups come together; there are too many registers of several.
  constexpr bool is_early = fragments == 1;
  uint2 early[is_early ? part_steps : 1][digits_of_number];
  float4 early_groups[is_early ? PartOfRows<bits, steps>::most : 1];
  if constexpr (is_early) {
#pragma unroll
    for (u32 j = 0; j < part_steps; j++) load(j, 0, early[j]);
#pragma unroll
    for (u32 i = 0; i < PartOfRows<bits, steps>::most; i++)
      if (i * of_group < count) early_groups[i] = groups_of(0, i);
  }
#pragma unroll
  for (u32 j = 0; j < part_steps; j++) {
    if (j >= count) break;
    const uint2 first = part.codes[0][j].bytes(), second = part.codes[1][j].bytes();
#pragma unroll
    for (u32 f = 0; f < fragments; f++) {
      uint2 x[digits_of_number];
      if constexpr (!is_early) load(j, f, x);
#pragma unroll
      for (u32 d = 0; d < digits_of_number; d++) {
        if constexpr (is_early) x[d] = early[j][d];
        multiply_bytes(c[f][d], first.x, second.x, first.y, second.y, x[d].x, x[d].y);
      }
    }
    if ((j + 1) % of_group != 0) continue;
    const u32 group = steps ? j / steps : j / of_group;
    float scales[2] = {}, biases[2] = {};
#pragma unroll
    for (u32 i = 0; i < PartOfRows<bits, steps>::most; i++)
#pragma unroll
      for (u32 r = 0; r < 2; r++)
        if (i == group) {
          scales[r] = number_of(part.scales[r][i], stored.number);
          biases[r] = number_of(part.biases[r][i], stored.number);
        }
#pragma unroll
    for (u32 f = 0; f < fragments; f++) {
      float4 two = {};
      if constexpr (is_early) {
#pragma unroll
        for (u32 i = 0; i < PartOfRows<bits, steps>::most; i++)
          if (i == group) two = early_groups[i];
      } else {
        two = groups_of(f, group);
      }
      const DigitGroup own[2] = {{two.x, two.y}, {two.z, two.w}};
#pragma unroll
      for (u32 i = 0; i < 4; i++) {  // row g, then g + 8, each with rows 2 t and 2 t + 1 of x
        sums[f][i] = with_group(sums[f][i], total_of_digits(c[f][0][i], c[f][1][i], c[f][2][i]), scales[i / 2],
                                biases[i / 2], own[i % 2]);
        c[f][0][i] = c[f][1][i] = c[f][2][i] = 0;
      }
    }
  }
#pragma unroll
  for (u32 f = 0; f < fragments; f++)
#pragma unroll
    for (u32 i = 0; i < 4; i++) parts[g + i / 2 * 8][f * fragment_rows + 2 * t + i % 2] = sums[f][i];
}

// Sixteen outputs of each row of x, into shared.totals. `block` is the first of the digits' blocks, which have
// `present` rows.
template <u32 bits, u32 steps, u32 fragments, class WaitForX>
DEV void outputs_of_some(const TwoRows<bits>& rows, const Storage& stored, const u8* digits, const DigitGroup* groups,
                         u64 block, u32 present, SomeRows<fragments>& shared, WaitForX wait_for_x) {
  constexpr u32 width = fragments * fragment_rows;
  const u32 warps = blockDim.x / lanes;
  const auto load = [&](PartOfRows<bits, steps>& part, u32 at) {
    const u32 step = at * part_steps;
    if (at < stored.parts()) part.load(rows, stored, step, min(part_steps, stored.steps() - step), true, true);
  };
  PartOfRows<bits, steps> next;
  load(next, warp_of());
  for (u32 i = threadIdx.x; i < tile_rows * width; i += blockDim.x) shared.totals[i / width][i % width] = 0.0f;
  wait_for_x();
  for (u32 first = 0; first < stored.parts(); first += warps) {
    const u32 part = first + warp_of(), step = part * part_steps;
    const PartOfRows<bits, steps> now = next;
    load(next, part + warps);
    if (part < stored.parts())
      part_of_some<bits, steps, fragments>(now, stored, reinterpret_cast<const uint2*>(digits), groups, block, present,
                                           step, min(part_steps, stored.steps() - step), shared.parts[warp_of()]);
    __syncthreads();
    for (u32 i = threadIdx.x; i < tile_rows * width; i += blockDim.x)
      for (u32 j = 0; j < min(warps, stored.parts() - first); j++)
        shared.totals[i / width][i % width] += shared.parts[j][i / width][i % width];
    __syncthreads();
  }
}

// Instances for every way in which affine weights may be stored: of `bits`, and those where a group's steps are known
// and its codes are aligned.
#define FOR_ALL_BITS(instance) instance(2) instance(3) instance(4) instance(5) instance(6) instance(8)
#define FOR_KNOWN_FORMATS(instance) instance(4_32, 4, 1) instance(4_64, 4, 2) instance(8_64, 8, 2)
#define FOR_ALL_FORMATS(instance)                                                                             \
  instance(2, 2, 0) instance(3, 3, 0) instance(4, 4, 0) instance(5, 5, 0) instance(6, 6, 0) instance(8, 8, 0) \
      FOR_KNOWN_FORMATS(instance)
