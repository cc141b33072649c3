// A model's layers as blocks. Here alone is said which block is made of which shape.
#pragma once

#include <memory>
#include <vector>

#include "engine/blocks/block.h"

namespace moeflux {

struct LayerBlocks {
  View input_norm;  // [hidden]
  std::unique_ptr<MixerBlock> mixer;
  std::unique_ptr<FeedForwardBlock> feed_forward;
};

// Without weights, and without room: enough to ask what they want.
std::vector<LayerBlocks> make_blocks(const Variant& variant);

}  // namespace moeflux
