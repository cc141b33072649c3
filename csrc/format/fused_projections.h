// qwen3_next keeps the input projections of a linear layer fused, rows grouped by key head:
//   in_proj_qkvz: for each key head [q key_dim | k key_dim | v r*value_dim | z r*value_dim]
//   in_proj_ba:   for each key head [b r | a r]            with r value heads a key head
// Seen through row spans they are the canonical in_proj_qkv (q of all heads, k of all, v of all), in_proj_z, in_proj_b
// and in_proj_a, without a byte moved.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "format/declared_formats.h"
#include "format/store_directory.h"

namespace moeflux {

// Rows of a tensor that lies in one stretch: (first, count) of each range, in their order.
StoredTensor take_rows(const StoredTensor& stored, const std::vector<std::pair<int64_t, int64_t>>& ranges);

// Replaces the fused projections of every linear layer in `table`, where there are any, and what is declared of them.
void split_fused_projections(TensorTable& table, DeclaredFormats& declared, const StoreDirectory& store);

}  // namespace moeflux
