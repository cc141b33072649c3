// What products multiply: x as digits, and the codes of a matrix with their scales and biases.
#pragma once
#include "basics.h"

// ---- x as digits ----------------------------------------------------------------------------------------------------

// Where a lane finds the digits of its pack: a step is 32 columns, a pack of each of four lanes. Within a group of
// `group_steps` steps, of which there are 1, 2 or 4, lane t of the four has packs t * group_steps ... in its steps, so
// that its codes lie together.
struct PackPlace {
  u32 step;
  u32 lane;
};
DEV PackPlace place_of_pack(u32 index, u32 group_steps) {
  const u32 shift = group_steps / 2, within = index & (4 * group_steps - 1);
  return {(index >> (2 + shift) << shift) + (within & (group_steps - 1)), within >> shift};
}

// Each digit of eight numbers: x for the even ones, y for the odd.
struct Digits {
  uint2 of[digits_of_number];
};

// The nearest whole number, the even one of two, of what is at most 2^22 in size, and shifted_digits more: its bytes
// are the digits, each and 128. A conversion takes four times as long.
constexpr u32 shifted_digits = 0x808080u;
DEV u32 nearest(float x) { return __float_as_uint(x + 12582912.0f) - (0x4b400000u - shifted_digits); }

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
  u32 own[pack], sum = 0;
#pragma unroll
  for (u32 i = 0; i < pack; i++) {
    own[i] = nearest(x[i] * up);
    sum += own[i];
  }
  sum = is_finite ? sum - pack * shifted_digits : 0;
  for (u32 distance = 2 * group_steps; distance > 0; distance /= 2) sum += __shfl_xor_sync(everyone, sum, distance);
  group.sum = float(int(sum));
  // Of four numbers each, the first bytes, the second and the third.
  const auto bytes_of = [&](u32 d, u32 first) {
    const u32 pairs = d < 2 ? 0x5140 : 0x0062, of_pairs = d == 1 ? 0x7632 : 0x5410;
    const u32 low = __byte_perm(own[first], own[first + 2], pairs),
              high = __byte_perm(own[first + 4], own[first + 6], pairs);
    return is_finite ? __byte_perm(low, high, of_pairs) ^ 0x80808080u : 0;
  };
  Digits digits;
#pragma unroll
  for (u32 d = 0; d < digits_of_number; d++) digits.of[d] = make_uint2(bytes_of(d, 0), bytes_of(d, 1));
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
DEV constexpr u32 width_of(u32 bits) { return bits == e2m1 ? 4 : bits; }  // bytes of a pack

template <u32 bits>
struct Codes {
  static constexpr u32 words = width_of(bits) == 4 || bits == 2 ? 1 : 2;
  u32 of[words];

  DEV uint2 bytes() const {
    if constexpr (bits == e2m1) {
      // Twice the sizes 0, 0.5, 1, 1.5, 2, 3, 4 and 6, then more or less than the byte of zero.
      const u32 low = __byte_perm(0x03020100u, 0x0c080604u, of[0] & 0x7777u),
                high = __byte_perm(0x03020100u, 0x0c080604u, of[0] >> 16 & 0x7777u);
      const auto with_signs = [](u32 sizes, u32 signs) {
        const u32 zero = e2m1_zero * 0x01010101u, negative = signs * 255u;
        return ((zero - sizes) & negative) | ((zero + sizes) & ~negative);
      };
      return make_uint2(with_signs(__byte_perm(low, high, 0x6420), of[0] >> 3 & 0x01010101u),
                        with_signs(__byte_perm(low, high, 0x7531), of[0] >> 7 & 0x01010101u));
    } else if constexpr (bits == 4) {
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
  if constexpr (width_of(bits) == 4) {
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
    for (u32 j = 0; j < count; j++) codes[j] = codes_at<bits>(from + j * width_of(bits));
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
    codes[i] = matrix.codes + row * (stored.columns / pack * width_of(bits));
    scales[i] = matrix.scales + scale;
    biases[i] = matrix.biases + scale;
  }
};

DEV float total_of_digits(int s0, int s1, int s2) { return fmaf(float(s2), 65536.0f, float(s1 * 256 + s0)); }

// A number as it is stored, so that what loads it need not wait for it.
DEV u32 stored_number(const u8* numbers, u64 i, u32 type) {
  if (type == number_f32) return reinterpret_cast<const u32*>(numbers)[i];
  if (type == number_u8) return numbers[i];
  return reinterpret_cast<const u16*>(numbers)[i];
}
DEV float number_of(u32 bits, u32 type) {
  return type == number_bf16 ? bf16(u16(bits)) : type == number_f16 ? f16(u16(bits)) : __uint_as_float(bits);
}

// What a group's codes, as bytes, are multiplied by, and what is added.
struct Scaling {
  float scale;
  float bias;
};
template <u32 bits>
DEV Scaling scaling_of(u32 scale, u32 bias, u32 type) {
  if constexpr (bits == e2m1) {
    const float half = power_of_two(scale) * 0.5f;
    return {half, half * -float(e2m1_zero)};
  } else {
    return {number_of(scale, type), number_of(bias, type)};
  }
}

DEV float with_group(float part, float total, const Scaling& by, const DigitGroup& group) {
  return fmaf(fmaf(by.scale, total, by.bias * group.sum), group.unit, part);
}

// What a lane needs of a part of two rows: its packs of each, and scale and bias of each group. A kernel loads it long
// before it multiplies. `steps` are those of a group, 0 where the kernel is for all: a part has at most `most` groups.
//
// Affine weights of known steps have whole parts, and scales of two bytes. Those of a part come together as words: each
// of their loads goes to sixteen lines, and one such load for each group was half of the time.
template <u32 bits, u32 steps>
struct PartOfRows {
  static constexpr u32 most = steps ? part_steps / steps : part_steps;
  static constexpr bool in_words = steps > 0 && bits != e2m1;
  static constexpr u32 words = in_words ? most / 2 : most;
  Codes<bits> codes[2][part_steps];  // in the order of groups, then of the lane's packs
  u32 scales[2][words];
  u32 biases[2][words];

  DEV static void load_words(const u8* from, u32 part, u32 (&to)[words]) {
    if constexpr (words == 2) {
      const uint2 both = reinterpret_cast<const uint2*>(from)[part];
      to[0] = both.x, to[1] = both.y;
    } else {
      to[0] = reinterpret_cast<const u32*>(from)[part];
    }
  }

  // Of rows 0 and 1 the scales are loaded if `first` and `second` say so. Steps from `step` on, `count` of them.
  DEV void load(const TwoRows<bits>& rows, const Storage& stored, u32 step, u32 count, bool first, bool second) {
    const u32 t = lane_of() % 4, of_group = steps ? steps : stored.group_steps;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      if constexpr (steps > 0) {
#pragma unroll
        for (u32 j = 0; j < most; j++) {
          Codes<bits> some[steps];
          if (in_words || j * steps < count) {
            codes_together<bits, steps>(rows.codes[i] + u64((step + j * steps) * 4 + t * steps) * width_of(bits), some);
#pragma unroll
            for (u32 k = 0; k < steps; k++) codes[i][j * steps + k] = some[k];
          }
        }
      } else {
#pragma unroll
        for (u32 j = 0; j < part_steps; j++)
          if (j < count)
            codes[i][j] =
                codes_at<bits>(rows.codes[i] + u64((step + j / of_group * of_group) * 4 + t * of_group + j % of_group) *
                                                   width_of(bits));
      }
      if (i == 0 ? !first : !second) continue;
      if constexpr (in_words) {
        load_words(rows.scales[i], step / part_steps, scales[i]);
        load_words(rows.biases[i], step / part_steps, biases[i]);
      } else {
#pragma unroll
        for (u32 j = 0; j < most; j++)
          if (j * of_group < count) {
            scales[i][j] = stored_number(rows.scales[i], step / of_group + j, stored.number);
            biases[i][j] =
                bits == e2m1 ? 0 : stored_number(rows.biases[i], step / of_group + j, stored.number);  // it has none
          }
      }
    }
  }

  DEV Scaling scaling(u32 row, u32 group, u32 type) const {
    u32 scale = 0, bias = 0;
#pragma unroll
    for (u32 i = 0; i < most; i++)
      if (i == group) {
        scale = in_words ? scales[row][i / 2] >> (i % 2 * 16) & 0xffffu : scales[row][i];
        bias = in_words ? biases[row][i / 2] >> (i % 2 * 16) & 0xffffu : biases[row][i];
      }
    return scaling_of<bits>(scale, bias, type);
  }
};
