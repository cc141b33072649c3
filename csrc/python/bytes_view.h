#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <span>

namespace moeflux::python {

namespace py = pybind11;

// The bytes of a Python object, contiguous, held until the end of the scope.
class BytesView {
 public:
  // With PyBUF_WRITABLE as `flags`, they may be written.
  explicit BytesView(const py::object& object, int flags = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw py::error_already_set();
  }
  ~BytesView() { PyBuffer_Release(&view_); }
  BytesView(const BytesView&) = delete;
  BytesView& operator=(const BytesView&) = delete;

  std::span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(view_.buf), static_cast<size_t>(view_.len)};
  }
  std::span<std::byte> writable() const { return {static_cast<std::byte*>(view_.buf), static_cast<size_t>(view_.len)}; }

 private:
  Py_buffer view_;
};

}  // namespace moeflux::python
