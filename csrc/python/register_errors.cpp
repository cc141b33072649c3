#include "core/error.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace moeflux::python {

void register_errors(py::module_& m) {
  // Translators run newest first, so the base comes first here.
  auto& base = py::register_exception<Error>(m, "Error", PyExc_RuntimeError);
  py::register_exception<FormatError>(m, "FormatError", base.ptr());
  py::register_exception<IoError>(m, "IoError", base.ptr());
  py::register_exception<DeviceError>(m, "DeviceError", base.ptr());
  py::register_exception<StateError>(m, "StateError", base.ptr());
  py::register_exception<BudgetError>(m, "BudgetError", base.ptr());
}

}  // namespace moeflux::python
