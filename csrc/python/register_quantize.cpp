// Quantising NumPy arrays. bf16 has no NumPy type: it travels as uint16, and so do f16 scales.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "core/quant_format.h"
#include "format/quantize.h"
#include "format/quantize_blocks.h"
#include "format/quantize_mxfp4.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace moeflux::python {
namespace {

std::string shape_text(const py::array& array) { return text_of(array.attr("shape")); }

bool contiguous(const py::array& array) { return (array.flags() & py::array::c_style) != 0; }

// The element type of an array to quantise.
DType number_type(const py::array& array) {
  const py::dtype type = array.dtype();
  if (type.equal(py::dtype::of<float>())) return DType::f32;
  if (type.equal(py::dtype::of<uint16_t>())) return DType::bf16;
  if (type.equal(py::dtype("float16"))) return DType::f16;
  throw ArgumentError(
      concat("[quantize] array: expected float32, float16 or uint16 (raw bf16), found ", text_of(type)));
}

py::array scale_array(const QuantFormat& format, int64_t rows, int64_t groups) {
  const py::dtype type = format.scale_type == DType::f32 ? py::dtype::of<float>() : py::dtype::of<uint16_t>();
  return py::array(type, std::vector<py::ssize_t>{rows, groups});
}

// f32 [columns], checked; null if there is none.
const float* importance_of(const std::optional<py::array_t<float, py::array::c_style>>& array, int64_t columns) {
  if (!array) return nullptr;
  if (array->ndim() != 1 || array->shape(0) != columns)
    throw ArgumentError(concat("[quantize] importance: expected shape (", columns, ",), found ", shape_text(*array)));
  for (int64_t i = 0; i < columns; ++i)
    if (!(std::isfinite(array->data()[i]) && array->data()[i] >= 0))
      throw ArgumentError(concat("[quantize] importance: expected finite numbers of 0 or more, found ",
                                 array->data()[i], " for column ", i));
  return array->data();
}

py::tuple quantize_array(const py::array& array, const QuantFormat& format, int threads,
                         const std::optional<py::array_t<float, py::array::c_style>>& importance) {
  if (array.ndim() != 2 || !contiguous(array))
    throw ArgumentError(
        concat("[quantize] array: expected two dimensions, contiguous, found shape ", shape_text(array)));
  const MatrixView matrix{array.data(), number_type(array), array.shape(0), array.shape(1)};
  if (!(format.is_affine() || format.is_mxfp4() || can_quantize_to(format)) || !format.fits(matrix.columns))
    throw ArgumentError(
        concat("[quantize] ", format.describe(), " does not fit an array of shape ", shape_text(array)));
  const float* weights = importance_of(importance, matrix.columns);
  if (format.is_blocks()) {
    py::array_t<uint8_t> blocks({matrix.rows, format.weight_row_bytes(matrix.columns)});
    auto* out = reinterpret_cast<std::byte*>(blocks.mutable_data());
    {
      const Released release;
      quantize_blocks(matrix, format, weights, out, threads);
    }
    return py::make_tuple(blocks);
  }

  py::array_t<uint32_t> words({matrix.rows, static_cast<int64_t>(format.weight_row_bytes(matrix.columns) / 4)});
  if (format.is_mxfp4()) {
    py::array_t<uint8_t> exponents({matrix.rows, matrix.columns / format.group_size});
    auto* codes = reinterpret_cast<std::byte*>(words.mutable_data());
    auto* out = reinterpret_cast<std::byte*>(exponents.mutable_data());
    {
      const Released release;
      quantize_mxfp4(matrix, weights, codes, out, threads);
    }
    return py::make_tuple(words, exponents);
  }
  py::array scales = scale_array(format, matrix.rows, matrix.columns / format.group_size);
  py::array biases = scale_array(format, matrix.rows, matrix.columns / format.group_size);
  const AffineParts<std::byte> parts{reinterpret_cast<std::byte*>(words.mutable_data()),
                                     static_cast<std::byte*>(scales.mutable_data()),
                                     static_cast<std::byte*>(biases.mutable_data())};
  {
    const Released release;
    quantize(matrix, format, parts, threads, weights);
  }
  return py::make_tuple(words, scales, biases);
}

// One part of an affine matrix. Its type and shape are checked against the format.
const std::byte* checked_part(const char* name, const py::array& array, const py::dtype& type, int64_t rows,
                              int64_t width) {
  const bool fits = array.ndim() == 2 && array.shape(0) == rows && array.shape(1) == width;
  if (!array.dtype().equal(type) || !fits || !contiguous(array))
    throw ArgumentError(concat("[dequantize] ", name, ": expected ", text_of(type), " (", rows, ", ", width,
                               ") contiguous, found ", text_of(array.dtype()), " ", shape_text(array)));
  return static_cast<const std::byte*>(array.data());
}

py::array_t<float> dequantize_arrays(const py::array& words, const py::array& scales, const py::array& biases,
                                     const QuantFormat& format, int64_t columns, int threads) {
  if (!format.is_affine() || !format.fits(columns))
    throw ArgumentError(concat("[dequantize] ", format.describe(), " does not fit ", columns, " columns"));
  if (words.ndim() != 2)
    throw ArgumentError(concat("[dequantize] words: expected two dimensions, found shape ", shape_text(words)));
  const int64_t rows = words.shape(0);
  const int64_t groups = columns / format.group_size;
  const py::dtype scale_type = format.scale_type == DType::f32 ? py::dtype::of<float>() : py::dtype::of<uint16_t>();
  const AffineParts<const std::byte> parts{
      checked_part("words", words, py::dtype::of<uint32_t>(), rows, format.weight_row_bytes(columns) / 4),
      checked_part("scales", scales, scale_type, rows, groups),
      checked_part("biases", biases, scale_type, rows, groups)};

  py::array_t<float> out({rows, columns});
  float* target = out.mutable_data();
  {
    const Released release;
    dequantize(parts, format, rows, columns, target, threads);
  }
  return out;
}

}  // namespace

void register_quantize(py::module_& m) {
  m.def("quantize", &quantize_array, py::arg("array"), py::arg("format"), py::arg("threads") = 0,
        py::arg("importance") = py::none(),
        "Quantises float32, float16 or uint16 (raw bf16) rows: (words, scales, biases), (words, scales) of MXFP4, or "
        "(blocks,). Affine without "
        "`importance`, float32 [columns], is MLX's.");
  m.def("dequantize", &dequantize_arrays, py::arg("words"), py::arg("scales"), py::arg("biases"), py::arg("format"),
        py::arg("columns"), py::arg("threads") = 0,
        "The float32 numbers that an affine matrix stands for: code * scale + bias.");
}

}  // namespace moeflux::python
