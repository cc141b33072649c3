// Is this still the process that something was made in? Known without asking the system, which would be a system call
// on every question.
#pragma once

#include <cstdint>

namespace moeflux {

// How many forks lie between the process that loaded this code and this one.
int64_t forks();

}  // namespace moeflux
