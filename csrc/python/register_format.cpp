// Files and folders of weights: what lies where, checked.
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include "core/error.h"
#include "core/text.h"
#include "format/expert_layout.h"
#include "format/json.h"
#include "format/manifest.h"
#include "format/mlx_store.h"
#include "format/packed_store.h"
#include "format/planned_store.h"
#include "format/safetensors.h"
#include "format/tensor_requirements.h"
#include "format/variant_json.h"
#include "python/bindings.h"
#include "python/bytes_view.h"
#include "python/store_object.h"

namespace py = pybind11;
namespace fs = std::filesystem;

namespace moeflux::python {
namespace {

// The document is at most json_max_depth deep.
// Members whose names are in `without` are None, however large they are.
py::object to_python(const Json& json, const std::set<std::string>& without = {}) {
  if (const bool* value = json.boolean()) return py::bool_(*value);
  if (const int64_t* value = json.integer()) return py::int_(*value);
  if (const double* value = json.real()) return py::float_(*value);
  if (const std::string* value = json.string()) return py::str(*value);
  if (const Json::Array* items = json.array()) {
    py::list list;
    for (const Json& item : *items) list.append(to_python(item, without));
    return list;
  }
  if (const Json::Object* members = json.object()) {
    py::dict dict;
    for (const JsonMember& member : *members)
      dict[py::str(member.key)] =
          without.contains(member.key) ? py::object(py::none()) : to_python(member.value, without);
    return dict;
  }
  return py::none();
}

py::tuple shape_to_python(const std::vector<int64_t>& shape) { return py::tuple(py::cast(shape)); }

py::list spans_to_python(const std::vector<Span>& spans) {
  py::list list;
  for (const Span& span : spans) list.append(py::make_tuple(span.file, span.offset, span.bytes));
  return list;
}

// What Python sees of a file's directory. The dict is made once, because callers look tensors up in loops.
struct SafetensorsFile {
  std::string path;
  int64_t header_bytes;
  std::map<std::string, std::string> metadata;
  py::dict tensors;
};

SafetensorsFile safetensors_file(const std::string& path, SafetensorsHeader header) {
  SafetensorsFile file{path, header.header_bytes, std::move(header.metadata), {}};
  for (TensorEntry& entry : header.tensors) {
    const py::str name(entry.name);
    file.tensors[name] = std::move(entry);
  }
  return file;
}

SafetensorsFile open_safetensors(const std::string& path) {
  SafetensorsHeader header;
  {
    const Released release;
    header = read_safetensors_header(path);
  }
  return safetensors_file(path, std::move(header));
}

std::unique_ptr<SafetensorsFile> safetensors_of(const py::object& data, const std::string& where) {
  const BytesView view(data);
  const std::span<const std::byte> bytes = view.bytes();
  SafetensorsHeader header = parse_safetensors_header(bytes, static_cast<int64_t>(bytes.size()), where);
  return std::make_unique<SafetensorsFile>(safetensors_file(where, std::move(header)));
}

void register_readers(py::module_& m) {
  m.def(
      "read_json",
      [](const fs::path& path) {
        Json json;
        {
          const Released release;
          json = read_json(path.string());
        }
        return to_python(json);
      },
      py::arg("path"), "The content of a JSON file, read strictly.");
  m.def(
      "parse_json",
      [](const std::string& text, const std::string& where, const std::set<std::string>& without) {
        Json json;
        {
          const Released release;
          json = parse_json(text, where);
        }
        return to_python(json, without);
      },
      py::arg("text"), py::arg("where") = "text", py::arg("without") = std::set<std::string>(),
      "The value of a JSON text (str or UTF-8 bytes), read strictly. Members named in `without` are checked, but "
      "None.");
  m.def(
      "read_variant",
      [](const std::string& text, const std::string& where, int version) {
        return to_python(variant_to_json(variant_from_json(parse_json(text, where), where, version)));
      },
      py::arg("text"), py::arg("where") = "variant", py::arg("version") = variant_version,
      "The fields of Variant.to_json(), read and checked. `version` is that of moeflux.json.");
  m.def(
      "variant_identity",
      [](const std::string& text) {
        Variant variant = parse_variant(text);
        variant.draft.reset();
        return to_python(variant_to_json_1(variant).value_or(variant_to_json(variant)));
      },
      py::arg("text"),
      "The fields that fingerprints are made of: those of version 1, if it can describe the variant. A layer that "
      "drafts "
      "is none of them.");
  m.def(
      "state_pieces",
      [](const std::string& text) {
        py::list list;
        int64_t index = 0;
        const Variant variant = parse_variant(text);
        for (; index < variant.num_layers(); ++index)
          for (const StatePiece& piece : variant.state(index))
            list.append(py::make_tuple(index, std::string(piece.name), piece.rows, shape_to_python(piece.shape),
                                       piece.unit, piece.window));
        return list;
      },
      py::arg("text"),
      "(layer, name, whether it has rows, shape of a row or of all of it, positions that share a row, how many of the "
      "last rows are seen at most or 0) of each piece of a session's state.");

  Class<TensorEntry>(m, "TensorEntry", "Where one tensor lies in its file.")
      .def_property_readonly("dtype", [](const TensorEntry& e) { return std::string(dtype_name(e.dtype)); })
      .def_property_readonly("shape", [](const TensorEntry& e) { return shape_to_python(e.shape); })
      .def_readonly("offset", &TensorEntry::offset, "Where it begins, from the start of the file.")
      .def_readonly("bytes", &TensorEntry::bytes)
      .def("__repr__", [](const TensorEntry& e) {
        return concat("TensorEntry(", describe_shape(e.dtype, e.shape), " at ", e.offset, ", ", e.bytes, " bytes)");
      });

  Class<SafetensorsFile>(m, "SafetensorsFile", "The checked directory of a safetensors file.")
      .def(py::init(
               [](const fs::path& path) { return std::make_unique<SafetensorsFile>(open_safetensors(path.string())); }),
           py::arg("path"))
      .def_static("of_bytes", &safetensors_of, py::arg("data"), py::arg("where"),
                  "The directory of a file that lies in memory. `where` is its path, and begins messages.")
      .def_property_readonly("path", [](const SafetensorsFile& f) { return path_to_python(f.path); })
      .def_readonly("header_bytes", &SafetensorsFile::header_bytes, "Where the data starts.")
      .def_readonly("metadata", &SafetensorsFile::metadata)
      .def_property_readonly("tensors", copy_of(&SafetensorsFile::tensors), "TensorEntry by name.");
}

void register_experts(py::module_& m) {
  Class<ExpertFormats>(m, "ExpertFormats", "The formats of the three matrices of every routed expert.")
      .def(constructor<ExpertFormats, QuantFormat, QuantFormat, QuantFormat>(), py::arg("gate"), py::arg("up"),
           py::arg("down"))
      .def_property_readonly("gate", copy_of(&ExpertFormats::gate))
      .def_property_readonly("up", copy_of(&ExpertFormats::up))
      .def_property_readonly("down", copy_of(&ExpertFormats::down))
      .def("__str__", &ExpertFormats::describe)
      .def("__repr__", [](const ExpertFormats& f) { return concat("ExpertFormats(", f.describe(), ")"); })
      .def(
          "__eq__", [](const ExpertFormats& a, const ExpertFormats& b) { return a == b; }, py::is_operator())
      .def("__hash__", [](const ExpertFormats& f) { return py::hash(py::str(f.describe())); });

  Class<ExpertLayout>(m, "ExpertLayout", "Where the pieces of one routed expert lie.")
      .def(py::init([](int64_t hidden, int64_t intermediate, QuantFormat gate, QuantFormat up, QuantFormat down) {
             return std::make_unique<ExpertLayout>(hidden, intermediate, ExpertFormats{gate, up, down});
           }),
           py::arg("hidden"), py::arg("intermediate"), py::arg("gate"), py::arg("up"), py::arg("down"))
      .def_readonly("hidden", &ExpertLayout::hidden)
      .def_readonly("intermediate", &ExpertLayout::intermediate)
      .def_property_readonly("formats", copy_of(&ExpertLayout::formats))
      .def_readonly("bytes", &ExpertLayout::bytes, "The bytes of one expert.")
      .def_property_readonly(
          "pieces",
          [](const ExpertLayout& layout) {
            py::list pieces;
            for (const ExpertPiece& piece : layout.pieces)
              pieces.append(py::make_tuple(piece.name, piece.offset, piece.bytes, std::string(dtype_name(piece.dtype)),
                                           shape_to_python(piece.shape)));
            return pieces;
          },
          "(name, offset, bytes, dtype, shape) of each piece, in order.");
}

void register_stores(py::module_& m) {
  Class<StoredTensor>(m, "Tensor", "A tensor of a store: an ordered list of byte ranges, row-major.")
      .def_property_readonly("dtype", [](const StoredTensor& t) { return std::string(dtype_name(t.dtype)); })
      .def_property_readonly("shape", [](const StoredTensor& t) { return shape_to_python(t.shape); })
      .def_property_readonly(
          "spans", [](const StoredTensor& t) { return spans_to_python(t.spans); },
          "(file, offset, bytes) of each range.")
      .def_readonly("negated_exp", &StoredTensor::negated_exp,
                    "Whether what is stored of a vector is -exp(x), in place of x.")
      .def_readonly("added", &StoredTensor::added, "What is added to each number of a vector, once it is in f32.")
      .def_readonly("step", &StoredTensor::step, "Of the stored numbers, every so many are its own.")
      .def_property_readonly(
          "is_table", [](const StoredTensor& t) { return t.kind == TensorKind::table; },
          "Whether its rows are read one by one and never all in memory.")
      .def_property_readonly(
          "is_vector", [](const StoredTensor& t) { return is_vector(t.kind); },
          "Whether this is a tensor of its own and no part of a matrix.")
      .def("__repr__", [](const StoredTensor& t) {
        return concat("Tensor(", describe_shape(t.dtype, t.shape), ", ", t.spans.size(), " spans)");
      });

  Class<Store>(m, "StoreDirectory", "What a store holds and where, checked against its variant.")
      .def_readonly("files", &Store::files, "Absolute paths. Spans refer to them by index.")
      .def_readonly("tensors", &Store::tensors, "Tensors by canonical name, without the routed experts.")
      .def_readonly("formats", &Store::formats, "QuantFormat of every matrix, by its base name.")
      .def_property_readonly(
          "experts", [](const Store& s) { return s.directory.experts; },
          "The layout of the experts; of a layer with the largest ones, where layers differ.")
      .def(
          "experts_of",
          [](const Store& s, int64_t layer) {
            const auto& places = s.directory.expert_places;
            if (layer < 0 || layer >= std::ssize(places) || places[static_cast<size_t>(layer)].empty())
              throw py::index_error(concat("layer: expected one with experts, found ", layer));
            return s.directory.experts_of(layer);
          },
          py::arg("layer"), "The layout of the experts of a layer.")
      .def(
          "part",
          [](const Store& s, int64_t first, int64_t last) {
            return store_object([&] {
              StoreDirectory part = s.directory;
              keep_layers(part, first, last);
              return part;
            });
          },
          py::arg("first"), py::arg("last"),
          "The same of some layers, the first and one past the last; 0: to the end. They are numbered from 0 on, and "
          "the "
          "names of their tensors stay as they are.")
      .def_property_readonly(
          "layers_differ", [](const Store& s) { return !s.directory.layouts.empty(); },
          "Whether layers have experts in different formats.")
      .def_property_readonly(
          "as_published", [](const Store& s) { return s.directory.as_published; },
          "Whether it is a checkpoint as Hugging Face lays it out.")
      .def_property_readonly(
          "ignored", [](const Store& s) { return s.directory.ignored; },
          "Names of tensors that are there and deliberately not used.")
      .def(
          "expert_spans",
          [](const Store& s, int64_t layer, int64_t expert) {
            return spans_to_python(s.directory.expert_spans(layer, expert));
          },
          py::arg("layer"), py::arg("expert"),
          "(file, offset, bytes) of each piece of the expert, in layout order, or of each row of a piece.")
      .def_property_readonly(
          "expert_files", [](const Store& s) { return s.directory.expert_files(); },
          "The files that hold experts, by index.");

  m.def(
      "required_tensors",
      [](const std::string& variant_json) {
        // This is for a store yet to be made. Latent attention is in stacks, as it is written today.
        const auto stacked = [](const std::string& name) { return name.find("kv_b_proj") == std::string::npos; };
        py::list list;
        for (const TensorRequirement& tensor : tensor_requirements(parse_variant(variant_json), stacked)) {
          const bool is_table = tensor.kind == TensorKind::table;
          list.append(py::make_tuple(tensor.name, shape_to_python(tensor.shape), !is_vector(tensor.kind) && !is_table,
                                     is_table));
        }
        return list;
      },
      py::arg("variant_json"),
      "(name, logical shape, whether a matrix, whether a table of rows) of everything but the routed experts. A matrix "
      "has its base name. "
      "Latent "
      "attention is in stacks where it may have either form.");
  m.def(
      "open_packed",
      [](const fs::path& weights_dir, const fs::path& experts_dir, const std::string& variant_json,
         const std::optional<ExpertFormats>& experts) {
        return store_object([&] {
          return open_packed(weights_dir.string(), experts_dir.string(), parse_variant(variant_json), experts);
        });
      },
      py::arg("weights_dir"), py::arg("experts_dir"), py::arg("variant_json"), py::arg("experts") = py::none(),
      "Opens a packed store. `experts_dir` holds the layer files. Without `experts`, the store is one of the older "
      "tools.");
  m.def(
      "planned_store",
      [](const std::string& variant_json, const QuantFormat& format) {
        return store_object([&] { return planned_store(parse_variant(variant_json), format); });
      },
      py::arg("variant_json"), py::arg("format"),
      "A packed store that nobody has made yet, with every matrix in that format.");
  m.def(
      "open_mlx",
      [](const fs::path& folder, const std::string& variant_json) {
        return store_object([&] { return open_mlx(folder.string(), parse_variant(variant_json)); });
      },
      py::arg("folder"), py::arg("variant_json"), "Opens a folder of MLX safetensors in place.");
}

}  // namespace

void register_format(py::module_& m) {
  register_readers(m);
  register_experts(m);
  register_stores(m);
}

}  // namespace moeflux::python
