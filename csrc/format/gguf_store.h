// A model in a GGUF file as a store: its tensors under the canonical names, and what llama.cpp's converter turned
// turned back.
//
// Matrices keep their bytes. Rows that were put in another order are read as byte ranges in the canonical one. Experts
// are three stacks [experts, rows, columns] a layer, so an expert takes three reads.
#pragma once

#include "format/gguf.h"
#include "format/store_directory.h"

namespace moeflux {

// `variant` is that of the values of `model`. FormatError when a tensor is missing, left over, or of another shape, or
// of a type that no kernel reads.
StoreDirectory open_gguf(const Gguf& model, const Variant& variant);

}  // namespace moeflux
