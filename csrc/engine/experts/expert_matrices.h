#pragma once

#include "backend/backend.h"
#include "io/expert_store.h"

namespace moeflux {

// An expert as it lies in a slot that begins there.
ExpertMatrices expert_matrices(const ExpertStore& store, View at);

}  // namespace moeflux
