// The device waits for all that is done here, once for each session. So this asks the interpreter for as little as may
// be: there is nothing to refuse or to convert, and whatever else is given goes another way.
#include "python/plain_step.h"

#include <pybind11/stl.h>

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "python/cancel.h"

namespace py = pybind11;

namespace moeflux::python {
namespace {

// The token of a list that has one.
std::optional<int32_t> only_token(PyObject* tokens) {
  if (!PyList_CheckExact(tokens) || PyList_GET_SIZE(tokens) != 1) return std::nullopt;
  PyObject* const token = PyList_GET_ITEM(tokens, 0);
  if (!PyLong_CheckExact(token)) return std::nullopt;
  int overflow = 0;
  const long value = PyLong_AsLongAndOverflow(token, &overflow);
  if (overflow != 0 || value < 0 || value > std::numeric_limits<int32_t>::max()) return std::nullopt;
  return static_cast<int32_t>(value);
}

// What an open session of Python has of ours, which lives as long as the object does; or nothing.
Session* session_of(const py::object& core) {
  py::detail::make_caster<Session> caster;
  return caster.load(core, false) ? py::detail::cast_op<Session*>(caster) : nullptr;
}

// The serial of each session's logits; nothing is done if the work is not a list of tuples of a session, which is of
// this kind and open, and a list of one token.
std::optional<std::vector<int64_t>> evaluate_step(Engine& engine, const py::object& given, const py::type& kind,
                                                  const Cancel* cancel) {
  if (!PyList_CheckExact(given.ptr()) || PyList_GET_SIZE(given.ptr()) == 0) return std::nullopt;
  const auto count = static_cast<size_t>(PyList_GET_SIZE(given.ptr()));
  const py::str open("_open");
  std::vector<py::object> cores;  // another thread may close a session
  std::vector<int32_t> tokens;
  std::vector<Work> work;
  cores.reserve(count);
  tokens.reserve(count);
  work.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    PyObject* const piece = PyList_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i));
    if (!PyTuple_CheckExact(piece) || PyTuple_GET_SIZE(piece) != 2) return std::nullopt;
    PyObject* const session = PyTuple_GET_ITEM(piece, 0);
    const std::optional<int32_t> token = only_token(PyTuple_GET_ITEM(piece, 1));
    if (!token || Py_TYPE(session) != reinterpret_cast<PyTypeObject*>(kind.ptr())) return std::nullopt;
    cores.push_back(py::reinterpret_steal<py::object>(PyObject_GetAttr(session, open.ptr())));
    if (!cores.back()) throw py::error_already_set();
    tokens.push_back(*token);
    Work& each = work.emplace_back();
    each.session = session_of(cores.back());
    if (!each.session) return std::nullopt;
    each.tokens = {&tokens.back(), 1};
  }
  std::vector<int64_t> serials(count);  // before: what comes behind must not fail
  Watch watch(cancel);
  {
    const Released release;
    engine.evaluate(work, std::ref(watch));
  }
  std::string failures;
  for (size_t i = 0; i < count; ++i) {
    serials[i] = work[i].serial;
    if (!work[i].failure.empty()) failures += concat("work[", i, "]: ", work[i].failure, "; ");
  }
  if (!failures.empty()) throw Error(failures + "the other sessions have gone on");
  return serials;
}

// The likeliest token. StateError if the logits are not those of the serial that is given, before or after: another
// thread may come in between.
int32_t argmax(const Session& session, std::optional<int64_t> serial) {
  const auto check = [&] {
    if (serial && *serial != session.logits_serial())
      throw StateError("logits: expected to be used before the session evaluates again, found used after");
  };
  check();
  const int32_t token = session.argmax();
  check();
  return token;
}

}  // namespace

void define_plain_step(Class<Engine, std::shared_ptr<Engine>>& engines, Class<Session>& sessions) {
  engines.def(
      "evaluate_step", &evaluate_step, py::arg("work"), py::arg("kind"), py::arg("cancel") = py::none(),
      "As `evaluate` of [(session, [token]), ...] with sessions of Python, which are of this class: returns the "
      "serials of their logits. None if the work is anything else.");
  sessions.def("argmax", &argmax, py::arg("serial") = py::none(), py::call_guard<Released>(),
               "The likeliest token. With `serial`, StateError if these are not the logits of that.");
}

}  // namespace moeflux::python
