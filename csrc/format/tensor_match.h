// Matching the tensors of a store with those that its variant needs.
#pragma once

#include <string>
#include <string_view>

#include "format/declared_formats.h"
#include "format/safetensors.h"
#include "format/store_directory.h"

namespace moeflux {

// Enters a tensor of file `file` into `table` under its canonical name, or into store.ignored when it is of an unused
// part.
void add_stored_tensor(const TensorEntry& entry, int64_t file, TensorTable& table, StoreDirectory& store,
                       BlockType block = BlockType::none);

// The format of matrix or stack `base`, whose logical shape is `shape`, from the shapes of X.weight, X.scales and
// X.biases in `table`. FormatError when one is missing or they do not fit each other, the shape, or what is declared.
QuantFormat matrix_format(const std::string& base, const std::vector<int64_t>& shape, const TensorTable& table,
                          const DeclaredFormats& declared, const StoreDirectory& store);

// Moves every tensor that store.variant needs from `table` into store.tensors and fills store.formats. FormatError for
// a missing tensor, and for one left over.
void match_tensors(TensorTable table, const DeclaredFormats& declared, StoreDirectory& store);

}  // namespace moeflux
