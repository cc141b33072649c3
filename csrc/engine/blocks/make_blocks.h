// A model's layers as blocks. Only this file knows which block belongs to which shape.
#pragma once

#include <memory>
#include <vector>

#include "engine/blocks/block.h"
#include "engine/blocks/connection.h"
#include "engine/blocks/ngram_rows_block.h"

namespace moeflux {

struct LayerBlocks {
  explicit LayerBlocks(const Stream& stream) : input(stream) {}

  std::unique_ptr<NgramRowsBlock> ngram;  // null in most layers
  Connection input;                       // of the mixer; the feed-forward part has its own
  std::unique_ptr<MixerBlock> mixer;
  std::unique_ptr<FeedForwardBlock> feed_forward;

  // For each block: body(block).
  template <typename Self, typename Body>
  static void each(Self& self, const Body& body) {
    if (self.ngram) body(*self.ngram);
    body(self.input);
    body(*self.mixer);
    body(*self.feed_forward);
  }
};

// What reads a residual stream of this variant.
Stream stream_of(const Variant& variant);

// The blocks without weights and without room: enough to ask what they need.
std::vector<LayerBlocks> make_blocks(const Variant& variant);

}  // namespace moeflux
