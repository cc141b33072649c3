// Routed experts as Hugging Face publishes them: plain elements, in tensors of their own or with gate and up in one
// stack, or MXFP4 with the rows of gate and up in turns.
#pragma once

#include <cstdint>
#include <vector>

#include "format/declared_formats.h"
#include "format/store_directory.h"

namespace moeflux {

struct LayerExperts {
  ExpertFormats formats;
  std::vector<ExpertPlace> places;  // of gate, up and down
};

// Whether the tensors are of a checkpoint that runs as it is published. FormatError where it must be converted first.
// Dense tensors then say what a model makes of them.
bool take_as_published(TensorTable& table, const StoreDirectory& store);

// Moves the experts of a layer out of `table`.
LayerExperts take_published_experts(int64_t layer, TensorTable& table, const DeclaredFormats& declared,
                                    const StoreDirectory& store);

}  // namespace moeflux
