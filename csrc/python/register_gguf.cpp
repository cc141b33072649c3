// GGUF files: their values and tensors, and the store that one is.
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <cstring>

#include "core/error.h"
#include "format/gguf.h"
#include "format/gguf_store.h"
#include "format/tensor_entry.h"
#include "format/variant_json.h"
#include "python/bindings.h"
#include "python/store_object.h"

namespace py = pybind11;
namespace fs = std::filesystem;

namespace moeflux::python {
namespace {

template <typename Number>
Number number_at(const GgufValue& value, size_t index) {
  Number number;
  std::memcpy(&number, value.numbers.data() + index * sizeof number, sizeof number);
  return number;
}

py::object number_to_python(const GgufValue& value, size_t index) {
  switch (value.kind) {
    case GgufKind::u8:
      return py::int_(number_at<uint8_t>(value, index));
    case GgufKind::i8:
      return py::int_(number_at<int8_t>(value, index));
    case GgufKind::u16:
      return py::int_(number_at<uint16_t>(value, index));
    case GgufKind::i16:
      return py::int_(number_at<int16_t>(value, index));
    case GgufKind::u32:
      return py::int_(number_at<uint32_t>(value, index));
    case GgufKind::i32:
      return py::int_(number_at<int32_t>(value, index));
    case GgufKind::f32:
      return py::float_(number_at<float>(value, index));
    case GgufKind::boolean:
      return py::bool_(number_at<uint8_t>(value, index) != 0);
    case GgufKind::u64:
      return py::int_(number_at<uint64_t>(value, index));
    case GgufKind::i64:
      return py::int_(number_at<int64_t>(value, index));
    case GgufKind::f64:
      return py::float_(number_at<double>(value, index));
    case GgufKind::string:
    case GgufKind::array:
      break;
  }
  return py::none();
}

// Arrays are at most gguf_max_depth deep.
py::object to_python(const GgufValue& value) {
  if (const std::string* text = value.string()) return py::str(*text);
  if (!value.is_array) return number_to_python(value, 0);
  py::list list;
  for (size_t i = 0; i < static_cast<size_t>(value.count); ++i) {
    if (value.kind == GgufKind::string)
      list.append(py::str(value.strings[i]));
    else if (value.kind == GgufKind::array)
      list.append(to_python(value.arrays[i]));
    else
      list.append(number_to_python(value, i));
  }
  return list;
}

std::unique_ptr<Gguf> opened(const fs::path& path) {
  const Released release;
  return std::make_unique<Gguf>(read_gguf(path.string()));
}

}  // namespace

void register_gguf(py::module_& m) {
  Class<GgufTensor>(m, "GgufTensor", "Where one tensor lies in which file.")
      .def_property_readonly("type", [](const GgufTensor& t) { return std::string(t.type.name); })
      .def_property_readonly(
          "shape", [](const GgufTensor& t) { return py::tuple(py::cast(t.shape)); }, "Its sizes, the slowest first.")
      .def_readonly("file", &GgufTensor::file, "Index into GgufFile.files.")
      .def_readonly("offset", &GgufTensor::offset, "Where it begins, from the start of its file.")
      .def_readonly("bytes", &GgufTensor::bytes)
      .def("__repr__", [](const GgufTensor& t) {
        return concat("GgufTensor(", t.type.name, " ", describe_shape(t.shape), " at ", t.offset, " of file ", t.file,
                      ", ", t.bytes, " bytes)");
      });

  Class<Gguf>(m, "GgufFile", "The checked directory of a model in a GGUF file, or in several that are its parts.")
      .def(py::init(&opened), py::arg("path"))
      .def_property_readonly("files",
                             [](const Gguf& g) {
                               py::list files;
                               for (const std::string& file : g.files) files.append(path_to_python(file));
                               return files;
                             })
      .def_readonly("header_bytes", &Gguf::header_bytes, "Of all files, without their tensors.")
      .def_property_readonly(
          "keys",
          [](const Gguf& g) {
            py::list keys;
            for (const auto& each : g.values) keys.append(py::str(each.first));
            return keys;
          },
          "The keys of its values, sorted.")
      .def(
          "value",
          [](const Gguf& g, const std::string& key) -> py::object {
            const auto found = g.values.find(key);
            return found == g.values.end() ? py::object(py::none()) : to_python(found->second);
          },
          py::arg("key"), "The value of a key, made anew: a number, bool, str, or a list of them. None without one.")
      .def_property_readonly("tensors", [](const Gguf& g) { return by_name(g.tensors); }, "GgufTensor by name.");

  m.def(
      "open_gguf",
      [](const Gguf& file, const std::string& variant_json) {
        return store_object([&] { return open_gguf(file, parse_variant(variant_json)); });
      },
      py::arg("file"), py::arg("variant_json"), "The model of a GGUF file as a store.");
}

}  // namespace moeflux::python
