// The errors moeflux throws; the Python module registers each under the same name.
// A message says where, what was expected and what was found.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace moeflux {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A file or a value that breaks its format.
struct FormatError : Error {
  using Error::Error;
};

// The operating system refused, or gave fewer bytes than a file holds.
struct IoError : Error {
  using Error::Error;
};

// An accelerator is missing, or a command on it failed.
struct DeviceError : Error {
  using Error::Error;
};

// A call that the object's present state does not allow.
struct StateError : Error {
  using Error::Error;
};

// A memory budget below what the model needs.
struct BudgetError : Error {
  using Error::Error;
};

// All parts as one string: the way messages are built.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace moeflux
