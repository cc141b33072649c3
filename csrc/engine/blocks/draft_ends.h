// The two ends of the layer that drafts (multi-token prediction). Between them it is a layer like the others. From the
// hidden state of a token and from the token that follows it guesses the one after that. One end makes its residual
// stream of both, the other is what the head reads.
#pragma once

#include "engine/blocks/block.h"

namespace moeflux {

class DraftEnds {
 public:
  explicit DraftEnds(const Stream& stream) : stream_(stream) {}

  void place(ScratchLayout& layout);
  void load(const LayerTensors& tensors);

  // The hidden states of the tokens before, for the caller to fill, and one that is not known.
  View before() const { return room_.before; }
  View unknown() const { return room_.unknown; }
  // scratch.hidden = what the layer reads, of the tokens in scratch.tokens and of `before`, which is used up.
  void begin(Commands& commands, const Scratch& scratch, const Matrix& embed, int64_t n) const;
  // scratch.normed = what the head reads.
  void end(Commands& commands, const Scratch& scratch, int64_t n) const;

 private:
  struct Room {
    View before;   // [n, hidden]
    View tokens;   // [n, hidden]: their rows of the embedding
    View unknown;  // [hidden]: zeros, for ever
  };

  Stream stream_;
  View token_norm_;  // [hidden], like the others
  View hidden_norm_;
  View out_norm_;
  Matrix of_token_;   // [hidden, hidden]
  Matrix of_hidden_;  // [hidden, hidden]
  Room room_;
};

}  // namespace moeflux
