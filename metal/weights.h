// Matrices as stored, eight columns at a time.
//
// An affine weight is code * scale + bias, and one whose code is a float is that * scale. In GGUF's blocks it is the
// one or the other. A product over a pack of columns is taken apart: scale * (codes . x) + bias * sum(x). What one row
// of x yields is the same chain of operations whatever rows are beside it. Each lane takes every 32nd pack, in the
// order of the columns, and the lanes are summed at the end.
#pragma once
#include "common.h"

// What blocks.h wants of the language.
#define MOEFLUX_INLINE inline
typedef device const uchar* Bytes;
inline uint half_word_at(Bytes at) { return *(device const ushort*)at; }
inline uint word_at(Bytes at) { return *(device const uint*)at; }
typedef uint2 TwoWords;
typedef uint4 FourWords;
inline TwoWords two_words_at(Bytes at) { return *(device const uint2*)at; }
inline FourWords four_words_at(Bytes at) { return *(device const uint4*)at; }
inline float float_of(uint bits) { return as_type<float>(bits); }
inline float f16_of(uint bits) { return float(as_type<half>(ushort(bits))); }
inline uint looked_up(uint codes, uint first, uint second, uint third, uint fourth) {
  uint found = 0;
  for (uint i = 0; i < 4; i++) {
    const uint code = codes >> (8 * i) & 15u;
    const uint word = code < 8 ? (code < 4 ? first : second) : (code < 12 ? third : fourth);
    found |= (word >> (code % 4 * 8) & 255u) << (8 * i);
  }
  return found;
}
#include "blocks.h"

// What the low four bits stand for: a sign, two bits of exponent, one of mantissa.
inline float float_of_e2m1(uint code) {
  const uint size = code & 7;
  const float twice = float(size < 5 ? size : size == 5 ? 6u : 4 * size - 16);
  return (code & 8) != 0 ? -0.5f * twice : 0.5f * twice;
}

// A sign, four bits of exponent, three of mantissa.
inline float float_of_e4m3(uint code) {
  const uint size = code & 127;
  const float number = size < 8 ? float(size) * 0.001953125f : as_type<float>((size << 20) + 0x3c000000u);
  return (code & 128) != 0 ? -number : number;
}

// Bits of a packed code. Those of blocks are packed in other ways, and any number will do for them.
constexpr uint width_of(int bits) {
  return bits == int(e2m1) ? 4 : bits == int(e4m3) || is_in_blocks(bits) ? 8 : uint(bits);
}

// The codes of eight columns, each of `bits` bits. They are `bits` bytes from `codes` on.
template <int bits>
inline void unpack(device const uchar* codes, thread float* weights) {
  if (bits == int(e2m1)) {
    const uint both = *(device const uint*)codes;
    for (uint i = 0; i < pack; i++) weights[i] = float_of_e2m1(both >> (4 * i));
    return;
  }
  constexpr uint width = width_of(bits);
  ulong word = 0;
  if (width == 2) {
    word = *(device const ushort*)codes;
  } else if (width == 4) {
    word = *(device const uint*)codes;
  } else if (width == 8) {
    word = ulong(*(device const uint*)codes) | ulong(*(device const uint*)(codes + 4)) << 32;
  } else {
    for (uint i = 0; i < width; i++) word |= ulong(codes[i]) << (8 * i);
  }
  for (uint i = 0; i < pack; i++) {
    const uint code = uint(word >> (width * i)) & ((1u << width) - 1u);
    weights[i] = bits == int(e4m3) ? float_of_e4m3(code) : float(code);
  }
}

inline float number_at(device const uchar* numbers, ulong i, uint type) {
  if (type == number_u8) return as_type<float>(max(uint(numbers[i]) << 23, 0x00400000u));
  if (type == number_e4m3) return float_of_e4m3(numbers[i]);
  if (type == number_bf16) return float(((device const bfloat*)numbers)[i]);
  if (type == number_f16) return float(((device const half*)numbers)[i]);
  return ((device const float*)numbers)[i];
}

inline uint bytes_of(uint type) { return type == number_f32 ? 4 : 2; }  // of a plain element

// bits = 0: plain elements.
template <int bits>
struct Weights {
  device const uchar* codes;
  device const uchar* scales;
  device const uchar* biases;
  uint columns;
  uint group_shift;
  uint number;  // the type of elements, or of scales and biases

  uint row_bytes() const {
    return is_in_blocks(bits) ? columns / block_columns(bits) * block_bytes(bits)
           : bits == 0        ? columns * bytes_of(number)
                              : columns / pack * width_of(bits);
  }
  uint row_groups() const { return columns >> group_shift; }

  // What the codes of a column's group are multiplied by. A row of scales E4M3 may begin with one of the whole row.
  float scale_at(ulong row, uint column) const {
    const uint group = column >> group_shift;
    if (number != number_e4m3_of_rows) return number_at(scales, row * row_groups() + group, number);
    device const uchar* own = scales + row * (4 + row_groups());
    return float_of_e4m3(own[4 + group]) * float_of(half_word_at(own) | half_word_at(own + 2) << 16);
  }
};

// Eight weights of a row from `column` on are weights[i] * scale + bias.
template <int bits>
struct Pack {
  float weights[pack];
  float scale;
  float bias;
};

template <int bits>
inline Pack<bits> pack_at(const thread Weights<bits>& matrix, ulong row, uint column) {
  Pack<bits> result;
  result.scale = 1.0f;
  result.bias = 0.0f;
  device const uchar* codes = matrix.codes + row * matrix.row_bytes();
  if (is_in_blocks(bits)) {
    device const uchar* block = codes + column / block_columns(bits) * block_bytes(bits);
    const EightCodes eight = codes_of_block<bits>(block, column % block_columns(bits));
    const BlockScale by = scale_of_block<bits>(block, column % block_columns(bits));
    for (uint i = 0; i < pack; i++) result.weights[i] = float(int(code_of(eight, i)) - zero_code(bits));
    result.scale = by.scale;
    result.bias = by.least;
  } else if (bits == 0) {
    for (uint i = 0; i < pack; i++)
      result.weights[i] = column + i < matrix.columns ? number_at(codes, column + i, matrix.number) : 0.0f;
  } else {
    unpack<bits>(codes + column / pack * width_of(bits), result.weights);
    result.scale = matrix.scale_at(row, column);
    if (bits != int(e2m1) && bits != int(e4m3)) {
      const ulong group = row * matrix.row_groups() + (column >> matrix.group_shift);
      result.bias = number_at(matrix.biases, group, matrix.number);
    }
  }
  return result;
}

// Multiplies the rows of the matrix from `first` on, none beyond `last`, with the rows of x. result[r][o] is the lane's
// part.
template <int bits, int rows, int outputs>
inline void add_products(const thread Weights<bits>& matrix, uint first, uint last,
                         device const float* thread (&x)[rows], uint lane, thread float (&result)[rows][outputs]) {
  for (int r = 0; r < rows; r++)
    for (int o = 0; o < outputs; o++) result[r][o] = 0.0f;
  for (uint column = lane * pack; column < matrix.columns; column += lanes * pack) {
    float numbers[rows][pack], sums[rows];
    for (int r = 0; r < rows; r++) {
      sums[r] = 0.0f;
      for (uint i = 0; i < pack; i++) {
        // Only at the end of a plain row there are fewer than a pack.
        numbers[r][i] = bits != 0 || column + i < matrix.columns ? x[r][column + i] : 0.0f;
        sums[r] += numbers[r][i];
      }
    }
    for (int o = 0; o < outputs; o++) {
      const Pack<bits> packed = pack_at(matrix, min(first + uint(o), last), column);
      for (int r = 0; r < rows; r++) {
        float sum = 0.0f;
        for (uint i = 0; i < pack; i++) sum = fma(packed.weights[i], numbers[r][i], sum);
        result[r][o] = bits == 0 ? result[r][o] + sum : fma(packed.bias, sums[r], fma(packed.scale, sum, result[r][o]));
      }
    }
  }
}

// Instances for every way in which weights may be stored, of a kernel template <int bits>, or <int bits, ...>: packed
// codes and plain elements, and GGUF's blocks.
#define instantiate_alone(name, function)      \
  instantiate_kernel(name "_0", function, 0)   \
  instantiate_kernel(name "_2", function, 2)   \
  instantiate_kernel(name "_3", function, 3)   \
  instantiate_kernel(name "_4", function, 4)   \
  instantiate_kernel(name "_5", function, 5)   \
  instantiate_kernel(name "_6", function, 6)   \
  instantiate_kernel(name "_8", function, 8)   \
  instantiate_kernel(name "_20", function, 20) \
  instantiate_kernel(name "_21", function, 21)
#define instantiate_formats(name, function, ...)            \
  instantiate_kernel(name "_0", function, 0, __VA_ARGS__)   \
  instantiate_kernel(name "_2", function, 2, __VA_ARGS__)   \
  instantiate_kernel(name "_3", function, 3, __VA_ARGS__)   \
  instantiate_kernel(name "_4", function, 4, __VA_ARGS__)   \
  instantiate_kernel(name "_5", function, 5, __VA_ARGS__)   \
  instantiate_kernel(name "_6", function, 6, __VA_ARGS__)   \
  instantiate_kernel(name "_8", function, 8, __VA_ARGS__)   \
  instantiate_kernel(name "_20", function, 20, __VA_ARGS__) \
  instantiate_kernel(name "_21", function, 21, __VA_ARGS__)
#define instantiate_blocks_alone(name, function)       \
  instantiate_kernel(name "_Q8_0", function, q8_0)     \
  instantiate_kernel(name "_Q4_0", function, q4_0)     \
  instantiate_kernel(name "_Q4_1", function, q4_1)     \
  instantiate_kernel(name "_Q5_0", function, q5_0)     \
  instantiate_kernel(name "_Q5_1", function, q5_1)     \
  instantiate_kernel(name "_Q2_K", function, q2_k)     \
  instantiate_kernel(name "_Q3_K", function, q3_k)     \
  instantiate_kernel(name "_Q4_K", function, q4_k)     \
  instantiate_kernel(name "_Q5_K", function, q5_k)     \
  instantiate_kernel(name "_Q6_K", function, q6_k)     \
  instantiate_kernel(name "_IQ4_NL", function, iq4_nl) \
  instantiate_kernel(name "_IQ4_XS", function, iq4_xs) \
  instantiate_kernel(name "_GGUF_MXFP4", function, gguf_mxfp4)
#define instantiate_blocks(name, function, ...)                     \
  instantiate_kernel(name "_Q8_0", function, q8_0, __VA_ARGS__)     \
  instantiate_kernel(name "_Q4_0", function, q4_0, __VA_ARGS__)     \
  instantiate_kernel(name "_Q4_1", function, q4_1, __VA_ARGS__)     \
  instantiate_kernel(name "_Q5_0", function, q5_0, __VA_ARGS__)     \
  instantiate_kernel(name "_Q5_1", function, q5_1, __VA_ARGS__)     \
  instantiate_kernel(name "_Q2_K", function, q2_k, __VA_ARGS__)     \
  instantiate_kernel(name "_Q3_K", function, q3_k, __VA_ARGS__)     \
  instantiate_kernel(name "_Q4_K", function, q4_k, __VA_ARGS__)     \
  instantiate_kernel(name "_Q5_K", function, q5_k, __VA_ARGS__)     \
  instantiate_kernel(name "_Q6_K", function, q6_k, __VA_ARGS__)     \
  instantiate_kernel(name "_IQ4_NL", function, iq4_nl, __VA_ARGS__) \
  instantiate_kernel(name "_IQ4_XS", function, iq4_xs, __VA_ARGS__) \
  instantiate_kernel(name "_GGUF_MXFP4", function, gguf_mxfp4, __VA_ARGS__)
