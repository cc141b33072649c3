// Memory that the system could give now without taking it from anyone.
#pragma once

#include <cstdint>

namespace moeflux {

// Of the whole machine; where the system does not say, half of what is built in.
int64_t free_memory();

}  // namespace moeflux
