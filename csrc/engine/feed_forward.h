// What the second half of a layer computes, wherever its experts lie: the op sequences around `expert_ffn`.
#pragma once

#include <cstdint>

#include "backend/backend.h"
#include "engine/model.h"
#include "engine/scratch.h"
#include "io/expert_store.h"

namespace moeflux {

// out = down(silu(gate(x)) * up(x)), n rows.
void record_feed_forward(Commands& commands, const FeedForwardWeights& weights, View x, View out, Scratch& scratch,
                         int64_t n);

// Norm, router logits, choice: ids and weights of the experts of n tokens. With `guess_rows`, the same of the next
// layer for the first of the hidden states, as they are before this layer's experts have added theirs.
void record_route(Commands& commands, const Model& model, int64_t layer, Scratch& scratch, int64_t n,
                  int64_t guess_rows);

// The shared expert, where there is one.
void record_shared(Commands& commands, const Model& model, int64_t layer, Scratch& scratch, int64_t n);

// hidden += what the experts gave, in router order, and the shared one.
void record_sum(Commands& commands, const Model& model, int64_t layer, const Scratch& scratch, int64_t n);

// An expert as it lies in a slot that begins there.
ExpertMatrices expert_matrices(const ExpertStore& store, View at);

}  // namespace moeflux
