// What is called once for each step: a token of each of some sessions, as `model.evaluate` of Python is given them, and
// the likeliest token of each.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "moeflux.h"
#include "python/class.h"

namespace moeflux::python {

void define_plain_step(Class<Engine, std::shared_ptr<Engine>>& engines, Class<Session>& sessions);

}  // namespace moeflux::python
