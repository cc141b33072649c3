// Tells whether this is still the process that something was made in, without a system call for every question.
#pragma once

#include <cstdint>

namespace moeflux {

// How many forks lie between the process that loaded this code and this one.
int64_t forks();

}  // namespace moeflux
