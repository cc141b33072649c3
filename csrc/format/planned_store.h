// A store that nobody has made yet: what planning needs to know of a model before any of it is there.
#pragma once

#include "core/quant_format.h"
#include "format/store_directory.h"

namespace moeflux {

// As a packed store would be with every matrix in `format` where that fits its columns, and in bf16 elsewhere. Its
// files are named and do not exist. FormatError when the format does not fit an expert.
StoreDirectory planned_store(Variant variant, const QuantFormat& format);

}  // namespace moeflux
