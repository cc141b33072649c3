// The interpreter's lock, and threads that are still at work when the interpreter ends.
//
// A daemon thread that asks for the lock then is ended by CPython in the middle of that call, before 3.14 by unwinding
// its stack, which destructors cannot let through: the process is aborted. So it stands still instead, until the
// process is over; from 3.14 on CPython has it so too. It holds nothing that anybody still waits for.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

namespace moeflux::python {

// What `body` returns: calls of CPython that may end the thread. Nothing else on the stack of `body`: it would be
// unwound.
template <typename Body>
auto unless_it_ends(const Body& body) {
#if defined(__GLIBCXX__)
  try {
    return body();
  } catch (const abi::__forced_unwind&) {
    for (;;) ::pause();
  }
#else
  return body();  // where threads end without being unwound
#endif
}

// Without the interpreter, for the length of a scope.
class Released {
 public:
  Released() : state_(PyEval_SaveThread()) {}
  ~Released() {
    unless_it_ends([this] { PyEval_RestoreThread(state_); });
  }
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;

 private:
  PyThreadState* state_;
};

// With it, in any thread.
class Acquired {
 public:
  Acquired() : state_(unless_it_ends([] { return PyGILState_Ensure(); })) {}
  ~Acquired() {
    unless_it_ends([this] { PyGILState_Release(state_); });
  }
  Acquired(const Acquired&) = delete;
  Acquired& operator=(const Acquired&) = delete;

 private:
  PyGILState_STATE state_;
};

// function(arguments ...), from work that runs without the interpreter. What it raises is thrown.
template <typename... Arguments>
pybind11::object call_back(const pybind11::handle& function, const Arguments&... arguments) {
  const pybind11::tuple given = pybind11::make_tuple(arguments...);
  PyObject* const result = unless_it_ends([&] { return PyObject_CallObject(function.ptr(), given.ptr()); });
  if (!result) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(result);
}

}  // namespace moeflux::python
