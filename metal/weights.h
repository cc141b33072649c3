// Matrices as stored, eight columns at a time.
//
// An affine weight is code * scale + bias, and one of MXFP4 is float * scale. A product over a pack of columns is taken
// apart: scale * (codes . x) + bias
// * sum(x). What one row of x yields is the same chain of operations whatever rows are beside it. Each lane takes every
// 32nd pack, in the order of the columns, and the lanes are summed at the end.
#pragma once
#include "common.h"

// What the low four bits stand for: a sign, two bits of exponent, one of mantissa.
inline float float_of_e2m1(uint code) {
  const uint size = code & 7;
  const float twice = float(size < 5 ? size : size == 5 ? 6u : 4 * size - 16);
  return (code & 8) != 0 ? -0.5f * twice : 0.5f * twice;
}

// The codes of eight columns, each of `bits` bits. They are `bits` bytes from `codes` on.
template <int bits>
inline void unpack(device const uchar* codes, thread float* weights) {
  if (bits == int(e2m1)) {
    const uint both = *(device const uint*)codes;
    for (uint i = 0; i < pack; i++) weights[i] = float_of_e2m1(both >> (4 * i));
    return;
  }
  ulong word = 0;
  if (bits == 2) {
    word = *(device const ushort*)codes;
  } else if (bits == 4) {
    word = *(device const uint*)codes;
  } else if (bits == 8) {
    word = ulong(*(device const uint*)codes) | ulong(*(device const uint*)(codes + 4)) << 32;
  } else {
    for (int i = 0; i < bits; i++) word |= ulong(codes[i]) << (8 * i);
  }
  for (uint i = 0; i < pack; i++) weights[i] = float(uint(word >> (bits * i)) & ((1u << bits) - 1u));
}

inline float number_at(device const uchar* numbers, ulong i, uint type) {
  if (type == number_u8) return as_type<float>(max(uint(numbers[i]) << 23, 0x00400000u));
  if (type == number_bf16) return float(((device const bfloat*)numbers)[i]);
  if (type == number_f16) return float(((device const half*)numbers)[i]);
  return ((device const float*)numbers)[i];
}

inline uint bytes_of(uint type) { return type == number_f32 ? 4 : 2; }  // of a plain element

constexpr uint width_of(int bits) { return bits == int(e2m1) ? 4 : uint(bits); }

// bits = 0: plain elements.
template <int bits>
struct Weights {
  device const uchar* codes;
  device const uchar* scales;
  device const uchar* biases;
  uint columns;
  uint group_shift;
  uint number;  // the type of elements, or of scales and biases

  uint row_bytes() const { return bits == 0 ? columns * bytes_of(number) : columns / pack * width_of(bits); }
  uint row_groups() const { return columns >> group_shift; }
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
  if (bits == 0) {
    for (uint i = 0; i < pack; i++)
      result.weights[i] = column + i < matrix.columns ? number_at(codes, column + i, matrix.number) : 0.0f;
  } else {
    const ulong group = row * matrix.row_groups() + (column >> matrix.group_shift);
    unpack<bits>(codes + column / pack * width_of(bits), result.weights);
    result.scale = number_at(matrix.scales, group, matrix.number);
    if (bits != int(e2m1)) result.bias = number_at(matrix.biases, group, matrix.number);
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

// Instances for every way in which weights may be stored, of a kernel template <int bits>, or <int bits, ...>.
#define instantiate_alone(name, function)    \
  instantiate_kernel(name "_0", function, 0) \
  instantiate_kernel(name "_2", function, 2) \
  instantiate_kernel(name "_3", function, 3) \
  instantiate_kernel(name "_4", function, 4) \
  instantiate_kernel(name "_5", function, 5) \
  instantiate_kernel(name "_6", function, 6) \
  instantiate_kernel(name "_8", function, 8) \
  instantiate_kernel(name "_20", function, 20)
#define instantiate_formats(name, function, ...)          \
  instantiate_kernel(name "_0", function, 0, __VA_ARGS__) \
  instantiate_kernel(name "_2", function, 2, __VA_ARGS__) \
  instantiate_kernel(name "_3", function, 3, __VA_ARGS__) \
  instantiate_kernel(name "_4", function, 4, __VA_ARGS__) \
  instantiate_kernel(name "_5", function, 5, __VA_ARGS__) \
  instantiate_kernel(name "_6", function, 6, __VA_ARGS__) \
  instantiate_kernel(name "_8", function, 8, __VA_ARGS__) \
  instantiate_kernel(name "_20", function, 20, __VA_ARGS__)
