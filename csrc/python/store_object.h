// What Python sees of a store, with its lists and dicts made once.
#pragma once

#include <pybind11/pybind11.h>

#include "format/store_directory.h"

namespace moeflux::python {

struct Store {
  StoreDirectory directory;
  pybind11::list files;
  pybind11::dict tensors;
  pybind11::dict formats;
};

}  // namespace moeflux::python
