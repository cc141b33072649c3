#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include "core/quant_format.h"
#include "core/text.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace moeflux::python {
namespace {

// What breaks a format in a file is a wrong argument here.
template <typename Make>
QuantFormat of_arguments(Make make) {
  try {
    return make();
  } catch (const FormatError& error) {
    throw ArgumentError(error.what());
  }
}

QuantFormat blocks_named(const std::string& name) {
  const BlockType type = block_type_named(name);
  if (type != BlockType::none) return QuantFormat::blocks(type);
  std::string names;
  for (const BlockShape& shape : block_shapes) names += concat(names.empty() ? "" : ", ", shape.name);
  throw ArgumentError(concat("type of blocks: expected one of ", names, ", found ", in_quotes(name)));
}

QuantFormat floats_named(const std::string& name) {
  if (const auto format = QuantFormat::float_named(name)) return *format;
  std::string names;
  for (const std::string_view each : QuantFormat::float_names) names += concat(names.empty() ? "" : ", ", each);
  throw ArgumentError(concat("codes that are floats: expected one of ", names, ", found ", in_quotes(name)));
}

std::vector<std::string> float_types() { return {QuantFormat::float_names.begin(), QuantFormat::float_names.end()}; }

std::vector<std::string> block_types() {
  std::vector<std::string> names;
  for (const BlockShape& shape : block_shapes) names.emplace_back(shape.name);
  return names;
}

}  // namespace

void register_quant_format(py::module_& m) {
  Class<QuantFormat>(m, "QuantFormat",
                     "How the numbers of one matrix are stored: affine groups, codes that are floats, GGUF's blocks, "
                     "or plain elements.")
      .def_static(
          "affine",
          [](int bits, int group_size, const std::string& scale_type) {
            return of_arguments(
                [&] { return QuantFormat::affine(bits, group_size, weight_dtype(scale_type, "scale_type")); });
          },
          py::arg("bits"), py::arg("group_size"), py::arg("scale_type") = "BF16")
      .def_static(
          "plain",
          [](const std::string& element) {
            return of_arguments([&] { return QuantFormat::plain(weight_dtype(element, "element")); });
          },
          py::arg("element"))
      .def_static("mxfp4", &QuantFormat::mxfp4)
      .def_static("floats", &floats_named, py::arg("name"))
      .def_static("float_types", &float_types)
      .def_static("blocks", &blocks_named, py::arg("name"))
      .def_static("block_types", &block_types)
      .def_readonly("bits", &QuantFormat::bits)
      .def_readonly("group_size", &QuantFormat::group_size)
      .def_property_readonly("is_quantised", &QuantFormat::is_quantised)
      .def_property_readonly("is_affine", &QuantFormat::is_affine)
      .def_property_readonly("is_mxfp4", &QuantFormat::is_mxfp4)
      .def_property_readonly("has_float_codes", &QuantFormat::has_float_codes)
      .def_property_readonly("is_blocks", &QuantFormat::is_blocks)
      .def_property_readonly("element", [](const QuantFormat& f) { return std::string(dtype_name(f.element)); })
      .def_property_readonly("scale_type", [](const QuantFormat& f) { return std::string(dtype_name(f.scale_type)); })
      .def_property_readonly("has_scales", &QuantFormat::has_scales)
      .def_property_readonly("whole_columns", &QuantFormat::whole_columns)
      .def("fits", &QuantFormat::fits, py::arg("columns"))
      .def("columns_of", &QuantFormat::columns_of, py::arg("elements"))
      .def("weight_row_bytes", &QuantFormat::weight_row_bytes, py::arg("columns"))
      .def("scale_row_bytes", &QuantFormat::scale_row_bytes, py::arg("columns"))
      .def("row_bytes", &QuantFormat::row_bytes, py::arg("columns"))
      .def("__str__", &QuantFormat::describe)
      .def("__repr__", [](const QuantFormat& f) { return concat("QuantFormat(", f.describe(), ")"); })
      .def("__hash__", [](const QuantFormat& f) { return py::hash(py::str(f.describe())); })
      .def(py::self == py::self);
}

}  // namespace moeflux::python
