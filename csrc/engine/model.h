// What every step of an engine reads and no step changes.
#pragma once

#include <vector>

#include "engine/blocks/draft_ends.h"
#include "engine/blocks/make_blocks.h"
#include "engine/weights.h"
#include "models/variant.h"

namespace moeflux {

struct Model {
  explicit Model(const Variant& of)
      : variant(of), layers(make_blocks(of)), output(stream_of(of)), draft(stream_of(of)) {}

  Variant variant;
  Matrix embed;                     // [vocab, hidden]; empty without the model's first layer
  Matrix head;                      // [vocab, hidden]; the embedding itself if the two are tied; empty without its last
  std::vector<LayerBlocks> layers;  // with the one that drafts, if there is one: the last
  Connection output;                // what the head reads; likewise
  DraftEnds draft;                  // of that layer; empty without it
  DenseWeights weights;             // the memory of all of the above
};

// `progress` is told after each piece. StateError when it says to stop.
Model load_model(const StoreDirectory& store, Backend& backend, const Progress& progress = {});

}  // namespace moeflux
