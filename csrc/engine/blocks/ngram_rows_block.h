// Rows of a table that a token and those before it choose, on their way into the residual streams.
#pragma once

#include "engine/blocks/block.h"
#include "models/ngram_embedding.h"

namespace moeflux {

class NgramRowsBlock final : public Block {
 public:
  NgramRowsBlock(const NgramEmbedding& shape, const Stream& stream, int64_t layer)
      : shape_(shape), stream_(stream), layer_(layer) {}

  void place(ScratchLayout& layout) override;
  void want(WorkSizes& sizes, int64_t rows) const override;
  void load(const LayerTensors& tensors) override;

  // Where the host puts the rows of each token side by side: [n, width]. No other layer has this room, so nothing that
  // is still to run reads what was there before.
  const Mirrored& rows() const { return rows_; }
  // scratch.hidden += what the rows make of it. The state of a piece is the last that its layer has.
  void record(Commands& commands, const Scratch& scratch, size_t layer, const Rows& rows) const;

 private:
  struct Weights {
    Matrix key;       // [streams * hidden, width]
    Matrix value;     // [hidden, width]
    View norm_key;    // [streams, hidden]
    View norm_query;  // [streams, hidden]
    View norm_conv;   // [streams, hidden]
    View conv;        // [streams * hidden, taps]
  };
  struct Room {
    View value;   // [n, hidden]
    View first;   // [n, streams, hidden]
    View second;  // [n, streams, hidden]
    View third;   // [n, streams, hidden]
  };

  NgramEmbedding shape_;
  Stream stream_;
  int64_t layer_;
  Mirrored rows_;
  Weights weights_;
  Room room_;
};

}  // namespace moeflux
