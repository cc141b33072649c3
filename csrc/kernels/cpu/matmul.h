// Matrices as stored, quantised or plain, times rows of f32.
//
// A weight is code * scale + bias in f32, rounded as the instruction set's multiply-add rounds, or the widened plain
// element. One of MXFP4 is exact: twice its code's number, which is whole, times half its scale. One of NVFP4 is the
// same after its scale was multiplied by that of the row, and one of FP8 or MXFP8 its code's number times its scale. So
// these, too, are the same on every instruction set. One of a block is what its type says (block_numbers.inl), to the
// last bit on every instruction set. An element of a product is one chain of multiply-adds for each lane, in the order
// of the columns, and then the sum of the lanes. So it depends neither on the number of rows nor on the rows beside it:
// one row or sixty-four at once give the same bits.
#pragma once

#include <cstdint>

#include "core/block_types.h"
#include "core/dtype.h"

namespace moeflux::cpu {

// A weight matrix in memory, laid out as core/quant_format.h says.
struct Weights {
  const uint8_t* codes = nullptr;  // packed codes, blocks, or plain elements
  const uint8_t* scales = nullptr;
  const uint8_t* biases = nullptr;  // where there are none: the scales, or the blocks, so that who asks finds memory
  int64_t code_stride = 0;          // bytes from row to row
  int64_t scale_stride = 0;         // of the scales, and of the biases; 0 for blocks
  int64_t row_scale_bytes = 0;      // of NVFP4: 4 if a row of scales begins with the f32 scale of the row
  int64_t columns = 0;
  int64_t group_size = 0;
  int bits = 0;                 // 0 for plain; of MXFP4 4, and its scales are u8; of NVFP4 4, with f8_e4m3
  DType element = DType::bf16;  // of a plain matrix; f8_e4m3 of FP8
  DType scale_type = DType::bf16;
  BlockType block = BlockType::none;
};

// How many rows of x one call of `multiply` may have.
constexpr int64_t max_block = 64;

struct MatmulKernels {
  // out[i][r] = W[r] . x[i] for matrix rows first ... last - 1 and the n <= max_block rows of x, which may lie
  // anywhere.
  void (*multiply)(const Weights& weights, int64_t first, int64_t last, const float* const* x, float* const* out,
                   int64_t n);
  // out[i][c] = sum of x[i][r] * W[r][c] over the `rows` rows of W, for columns first ... last - 1; `first` is a
  // multiple of 32, and so is `last` unless it is the number of columns. n <= max_block.
  void (*multiply_transposed)(const Weights& weights, int64_t rows, int64_t first, int64_t last, const float* const* x,
                              float* const* out, int64_t n);
  // One row as f32: [columns].
  void (*dequantize)(const Weights& weights, int64_t row, float* out);
};

}  // namespace moeflux::cpu
