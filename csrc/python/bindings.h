// There is one function for each category, and module.cpp calls all of them.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <utility>

#include "python/class.h"
#include "python/interpreter.h"

namespace moeflux::python {

// As Python's str(). Through a handle: pybind11 before 3.1 does not know which constructor to take for a dtype.
inline std::string text_of(const pybind11::handle& object) { return std::string(pybind11::str(object)); }

// Notices Ctrl-C in the middle of long work that runs without the interpreter's lock. Throws KeyboardInterrupt, or what
// the handler of a signal raised.
inline void check_signals() {
  const Acquired acquire;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

// What only tests do: `_core.testing`. A class, of which nobody makes an object: with a module the stub would be two
// files.
struct Testing {};

// A function whose first argument says what goes wrong, for users: nothing does.
template <typename Result, typename Faults, typename... Given>
auto without_faults(Result (*function)(const Faults&, Given...)) {
  return [function](Given... given) { return function(Faults{}, std::forward<Given>(given)...); };
}

void register_activations(pybind11::module_& m);
void register_decoder(pybind11::module_& m);
void register_engine(pybind11::module_& m, Class<Testing>& testing);
void register_errors();
void register_format(pybind11::module_& m);
void register_gguf(pybind11::module_& m);
void register_io(pybind11::module_& m);
void register_metal(pybind11::module_& m);
void register_cuda(pybind11::module_& m);
void register_ops(pybind11::module_& m, Class<Testing>& testing);
void register_probe(pybind11::module_& m);
void register_quant_format(pybind11::module_& m);
void register_quantize(pybind11::module_& m);
void register_ring(pybind11::module_& m);
void register_sampling(pybind11::module_& m);
void register_snapshot(pybind11::module_& m);
Class<Testing> register_testing(pybind11::module_& m);
void register_trace(pybind11::module_& m);

}  // namespace moeflux::python
