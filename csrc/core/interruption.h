// Long work that its caller may give up.
#pragma once

#include <functional>

#include "core/error.h"

namespace moeflux {

// The thread that does long work calls this in the middle of it. It throws when the work is to be given up, and the
// exception passes through.
using Interruption = std::function<void()>;

// Thrown by an Interruption when the caller wants no more.
struct Cancelled : Error {
  using Error::Error;
};

}  // namespace moeflux
