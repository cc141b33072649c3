#pragma once

#include "backend/backend.h"
#include "io/expert_store.h"

namespace moeflux {

// The matrices of an expert of a layer in the slot that begins at `at`.
ExpertMatrices expert_matrices(const ExpertStore& store, int64_t layer, View at);

}  // namespace moeflux
