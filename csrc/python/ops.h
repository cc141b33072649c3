// The ops of a backend, one at a time on NumPy arrays: what the files register_*ops.cpp bind.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "backend/timed_backend.h"
#include "python/bindings.h"
#include "python/op_arguments.h"

namespace moeflux::python {

using Array = py::array;

struct Ops {
  std::unique_ptr<OpTimes> times;
  std::unique_ptr<Backend> backend;

  OpArguments arguments(const char* op) const { return {*backend, op}; }
};

// Experts.
void register_expert_ops(Class<Ops>& ops);
// Attention, and what the delta-net is made of.
void register_mixer_ops(Class<Ops>& ops);
// What attention sees where an index selects it.
void register_selection_ops(Class<Ops>& ops);
// Residual streams, and the gate of n-gram embeddings.
void register_hyper_ops(Class<Ops>& ops);
// What is found in logits.
void register_choosing_ops(Class<Ops>& ops);

}  // namespace moeflux::python
