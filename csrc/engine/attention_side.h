// The first half of a layer: norm, attention of the layer's kind, residual.
#pragma once

#include "backend/backend.h"
#include "engine/layer_state.h"
#include "engine/model.h"
#include "engine/scratch.h"

namespace moeflux {

// The rows of a call, and where they stand in their session.
struct Rows {
  int64_t position = 0;  // of the first
  int64_t n = 0;
};

// scratch.hidden += attention(norm(scratch.hidden)); `state` takes up the rows. scratch.angles hold those of the rows.
void record_attention_side(Commands& commands, const Model& model, int64_t layer, const LayerState& state,
                           Scratch& scratch, Rows rows);

}  // namespace moeflux
