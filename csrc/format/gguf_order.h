// llama.cpp's converter puts rows of some matrices in an order that suits its kernels. Here they get that of the
// published checkpoints back, as byte ranges:
//   mixtral    rows of q and k: row 2 j + p of a head is row p d/2 + j of its d, for the two halves turn together
#pragma once

#include "format/store_directory.h"

namespace moeflux {

// Of tensors that have the shapes which the variant needs.
void restore_order(TensorTable& table, const StoreDirectory& store);

}  // namespace moeflux
