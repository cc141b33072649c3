#pragma once

#include <optional>

#include "engine/blocks/block.h"
#include "engine/blocks/unit_index.h"
#include "models/grouped_attention.h"

namespace moeflux {

class GroupedAttentionBlock final : public MixerBlock {
 public:
  GroupedAttentionBlock(const GroupedAttention& shape, const Stream& stream);

  void place(ScratchLayout& layout) override;
  void want(WorkSizes& sizes, int64_t rows) const override;
  void load(const LayerTensors& tensors) override;
  void record(Commands& commands, Scratch& scratch, size_t layer, const Rows& rows) const override;
  void keep(Commands& commands, Scratch& scratch, size_t layer, const Rows& rows) const override;

 private:
  // Appends the keys and values, and makes the queries ready if they are wanted.
  void record_rows(Commands& commands, const Scratch& scratch, size_t layer, const Rows& rows, bool queries) const;
  void record_products(Commands& commands, const Scratch& scratch, int64_t n, bool queries) const;
  Heads queries() const;

  struct Weights {
    Matrix q;     // [heads * dim, or twice that with a gate, hidden]
    Matrix k;     // [kv_heads * dim, hidden]
    Matrix v;     // [kv_heads * dim, hidden]; empty where keys are values
    Matrix o;     // [hidden, heads * dim]
    View q_norm;  // [dim], or [heads * dim] where all heads are normed as one; empty where none are
    View k_norm;  // [dim], or [kv_heads * dim]
    View q_bias;  // as many as q has rows; empty without biases
    View k_bias;
    View v_bias;
    View o_bias;    // [hidden]; empty without one
    View sinks;     // [heads]; empty without any
    View out_norm;  // [hidden]; empty without it
  };
  struct Room {
    View angles;
    View q;      // [n, heads * dim, or twice that with a gate]
    View k;      // [n, kv_heads * dim]
    View v;      // [n, kv_heads * dim]
    View mixed;  // [n, heads * dim]
  };

  GroupedAttention shape_;
  Stream stream_;
  std::optional<UnitIndex> index_;
  Weights weights_;
  Room room_;
};

}  // namespace moeflux
