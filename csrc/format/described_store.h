// A packed store by its moeflux.json, which says the variant and the formats of the experts. What C++ programs open;
// Python reads the same file for its checksums too.
#pragma once

#include <string>

#include "format/store_directory.h"

namespace moeflux {

StoreDirectory open_described_store(const std::string& folder);

}  // namespace moeflux
