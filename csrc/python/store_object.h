// What Python sees of a store, with its lists and dicts made once.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl/filesystem.h>

#include <filesystem>
#include <string>

#include "format/store_directory.h"
#include "python/interpreter.h"

namespace moeflux::python {

struct Store {
  StoreDirectory directory;
  pybind11::list files;
  pybind11::dict tensors;
  pybind11::dict formats;
};

// The str that os.fsdecode would give, whatever bytes the name has.
inline pybind11::object path_to_python(const std::string& path) {
  return pybind11::str(pybind11::cast(std::filesystem::path(path)));
}

template <typename Named>
pybind11::dict by_name(const Named& entries) {
  pybind11::dict dict;
  for (const auto& [name, value] : entries) dict[pybind11::str(name)] = value;
  return dict;
}

// Runs `open` without the interpreter.
template <typename Open>
Store store_object(const Open& open) {
  Store store;
  {
    const Released release;
    store.directory = open();
  }
  for (const std::string& file : store.directory.files) store.files.append(path_to_python(file));
  store.tensors = by_name(store.directory.tensors);
  store.formats = by_name(store.directory.formats);
  return store;
}

}  // namespace moeflux::python
