#pragma once

#include <optional>

#include "engine/blocks/block.h"
#include "engine/blocks/row_selection.h"
#include "models/latent_attention.h"

namespace moeflux {

class LatentAttentionBlock final : public MixerBlock {
 public:
  LatentAttentionBlock(const LatentAttention& shape, const Stream&) : shape_(shape) {
    if (shape.index) selection_.emplace(*shape.index);
  }

  void place(ScratchLayout& layout) override;
  void want(WorkSizes& sizes, int64_t rows) const override;
  void load(const LayerTensors& tensors) override;
  void record(Commands& commands, Scratch& scratch, size_t layer, const Rows& rows) const override;
  void keep(Commands& commands, Scratch& scratch, size_t layer, const Rows& rows) const override;

 private:
  // The matrices from latents to keys and values are either kv_b or embed_q and unembed_out. The others are empty.
  struct Weights {
    Matrix q_a;          // [q_rank, hidden]; empty when queries are not compressed
    View q_a_norm;       // [q_rank]
    Matrix q_b;          // [heads * (nope + rope), q_rank or hidden]
    Matrix kv_a;         // [rank + rope, hidden]
    View kv_a_norm;      // [rank]
    Matrix kv_b;         // [heads * (nope + v), rank]
    Matrix embed_q;      // [heads * rank, nope]: a stack, one matrix a head
    Matrix unembed_out;  // [heads * v, rank]: likewise
    Matrix o;            // [hidden, heads * v]
    // Of the index, if there is one.
    Matrix index_q;   // [index heads * index dim, q_rank]
    Matrix index_k;   // [index dim, hidden]
    View index_norm;  // [index dim], as its bias
    View index_norm_bias;
    Matrix index_weights;  // [index heads, hidden]
  };
  struct Room {
    View angles;
    View q;              // [n, heads * (nope + rope)]
    View q_low;          // [n, q_rank]
    View kv;             // [n, rank + rope]
    View q_latent;       // [n, heads, rank]
    View latents;        // [n, heads, rank]
    View mixed;          // [n, heads * v]
    View index_q;        // [n, index heads, index dim]
    View index_k;        // [n, index dim]
    View index_weights;  // [n, index heads]
  };

  // `selects`: whether queries of the index are needed, too.
  void record_queries_and_latent(Commands& commands, const Scratch& scratch, int64_t n, bool selects) const;
  // Norms and ropes of what the products made; of queries where they are wanted.
  void record_turns(Commands& commands, int64_t n, bool queries, bool selects) const;
  void append(Commands& commands, size_t layer, const Rows& rows) const;
  // The same as turns, for the index.
  void record_index(Commands& commands, int64_t n, bool selects) const;
  void record_attention(Commands& commands, const Piece& piece, const RowPair& cached, const LayerState& state) const;
  // A row of kv is [latent | rotated key]; a head of q is [unrotated | rotated].
  Heads latent() const;
  Heads rotated_key() const;
  Heads rotated_queries() const;
  Product into_latent(int64_t head) const;
  Product out_of_latent(int64_t head) const;

  LatentAttention shape_;
  Weights weights_;
  Room room_;
  std::optional<RowSelection> selection_;
};

}  // namespace moeflux
