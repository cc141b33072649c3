// What matrices were multiplied with, for conversions that weigh columns by it.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "engine/activation_moments.h"
#include "engine/engine.h"
#include "python/bindings.h"
#include "python/store_object.h"

namespace py = pybind11;

namespace moeflux::python {
namespace {

template <typename Number>
py::array_t<Number> array_of(const std::vector<Number>& numbers, std::vector<py::ssize_t> shape) {
  py::array_t<Number> array(std::move(shape));
  std::ranges::copy(numbers, array.mutable_data());
  return array;
}

py::array_t<double> row_of(const std::vector<double>& numbers) {
  return array_of(numbers, {static_cast<py::ssize_t>(numbers.size())});
}

py::dict dense_of(const ActivationMoments& moments) {
  py::dict all;
  for (const auto& [name, sums] : moments.dense()) all[py::str(name)] = py::make_tuple(sums.rows, row_of(sums.squares));
  return all;
}

py::list experts_of(const ActivationMoments& moments) {
  py::list all;
  for (const auto& [layer, each] : moments.experts()) {
    const auto count = static_cast<py::ssize_t>(each.rows.size());
    const py::ssize_t width = count ? static_cast<py::ssize_t>(each.squares.size()) / count : 0;
    all.append(py::make_tuple(layer, each.input.rows, row_of(each.input.squares), array_of(each.rows, {count}),
                              array_of(each.squares, {count, width})));
  }
  return all;
}

void observe(Engine& engine, const Store& store, std::shared_ptr<ActivationMoments> moments) {
  const Released release;
  dynamic_cast<LoadedEngine&>(engine).observe_activations(store.directory, std::move(moments));
}

}  // namespace

void register_activations(py::module_& m) {
  Class<ActivationMoments, std::shared_ptr<ActivationMoments>>(
      m, "ActivationMoments", "Sums of squares of what matrices meet. See moeflux.measure.calibrate.")
      .def(py::init([](const Engine& engine) { return std::make_shared<ActivationMoments>(engine.variant()); }),
           py::arg("engine"))
      .def("dense", &dense_of, "{name of a matrix: (rows, sums of squares f64 [columns])}")
      .def("experts", &experts_of,
           "[(layer, rows, sums f64 [hidden] of gate and up, rows i64 [experts], sums f64 [experts, intermediate] of "
           "down)]");
  m.def("observe_activations", &observe, py::arg("engine"), py::arg("store"), py::arg("moments").none(true),
        "Adds to `moments` what the matrices of the engine, which was opened from `store`, meet from now on. None ends "
        "it.");
}

}  // namespace moeflux::python
