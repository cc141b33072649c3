// A model's layers as blocks. Only this file knows which block belongs to which shape.
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

// The blocks without weights and without room: enough to ask what they need.
std::vector<LayerBlocks> make_blocks(const Variant& variant);

}  // namespace moeflux
