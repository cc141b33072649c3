#include <new>

#include "core/error.h"
#include "core/interruption.h"
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
  py::register_exception<Cancelled>(m, "Cancelled", base.ptr());
  // One of ours, which a translator above makes Python's.
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(std::move(thrown));
    } catch (const std::bad_alloc&) {
      throw IoError("memory: expected more from the system, which has none left");
    }
  });
}

}  // namespace moeflux::python
