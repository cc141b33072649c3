// Affine quantisation and back, bit for bit what MLX's CPU quantiser does.
//
// A group of weights becomes codes 0 ... top (top = 2^bits - 1), a scale and a bias; all arithmetic is f32, each
// operation rounded by itself:
//   edge  = whichever of the group's minimum and maximum is larger in magnitude (the maximum if equal)
//   step  = max((maximum - minimum) / top, 1e-7), negative when the edge is the maximum
//   n     = round(edge / step), the code at which zero lies, counted from the edge
//   scale = edge / n, bias = edge            or scale = step, bias = 0 when n is 0
//   code  = round((weight - bias) / scale), clamped to 0 ... top
// so that zero and the edge are met exactly. Codes come from the f32 scale and bias; the stored ones are rounded to the
// scale type. MLX always takes the input's type for it. So with input bf16 and scale type BF16 (and so on) the results
// are MLX's. A scale type that differs from the input's is our own extension of the same rule.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "core/quant_format.h"

namespace moeflux {

// Numbers to quantise: f32, or bf16 or f16 raw. Contiguous rows, borrowed for the call.
struct MatrixView {
  const void* data;  // [rows, columns]
  DType type;
  int64_t rows;
  int64_t columns;
};

// The three parts of an affine matrix, borrowed for the call.
template <typename Byte>
struct AffineParts {
  Byte* words;   // [rows, weight_row_bytes(columns)]
  Byte* scales;  // [rows, scale_row_bytes(columns)]
  Byte* biases;  // as scales
};

// Rows are shared out over `threads` threads, 0 for as many as the machine runs at once; the result does not depend on
// it. FormatError names row and columns of the first group that holds a NaN or an infinity, or whose scale or bias is
// beyond the scale type; the parts then hold no meaning.
//
// With `importance`, f32 [columns], all of them finite, 0 or more, an error in a column weighs so much, and scale and
// bias are those of the least weighted squared error that a search finds. They are not MLX's then.
void quantize(const MatrixView& matrix, const QuantFormat& format, const AffineParts<std::byte>& parts, int threads = 0,
              const float* importance = nullptr);

// code * scale + bias, two roundings, into out [rows, columns]. MLX does the same in the type of the scales: equal to
// ours when that is f32, and rounded once more after the product and after the sum when it is narrower.
void dequantize(const AffineParts<const std::byte>& parts, const QuantFormat& format, int64_t rows, int64_t columns,
                float* out, int threads = 0);

}  // namespace moeflux
