// A packed store by its moeflux.json, which has the variant and the formats of the experts. C++ programs open this.
// Python reads the same file for its checksums too.
#pragma once

#include <string>

#include "format/store_directory.h"

namespace moeflux {

StoreDirectory open_described_store(const std::string& folder);

// The SHA-256 of every expert, [layer][expert], as moeflux.json of that folder has them.
ExpertChecksums read_expert_checksums(const std::string& folder, const Variant& variant);

}  // namespace moeflux
