// Long work that its caller may give up.
#pragma once

#include <functional>

#include "core/error.h"

namespace moeflux {

// A look around in the middle of long work, by the thread that does it. It throws when the work is to be given up, and
// that passes through.
using Interruption = std::function<void()>;

// Thrown by one: the caller wants no more.
struct Cancelled : Error {
  using Error::Error;
};

}  // namespace moeflux
