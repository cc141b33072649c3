#include "engine/blocks/grouped_attention.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace moeflux {

void GroupedAttentionBlock::place(ScratchLayout& layout) {
  const int64_t n = layout.rows();
  layout.place_angles(room_.angles, shape_.rope);
  layout.place(room_.q, "q", n * shape_.q_width());
  layout.place(room_.k, "k", n * shape_.kv_width());
  layout.place(room_.v, "v", n * shape_.kv_width());
  layout.place(room_.mixed, "mixed", n * shape_.out_width());
}

void GroupedAttentionBlock::want(WorkSizes& sizes, int64_t rows) const {
  sizes.value_dim = std::max(sizes.value_dim, shape_.head_dim);
  sizes.heads = std::max(sizes.heads, shape_.heads);
  sizes.inputs = std::max(sizes.inputs, rows * shape_.out_width());
}

void GroupedAttentionBlock::load(const LayerTensors& tensors) {
  weights_ = {
      .q = tensors.matrix("self_attn.q_proj"),
      .k = tensors.matrix("self_attn.k_proj"),
      .v = tensors.matrix("self_attn.v_proj"),
      .o = tensors.matrix("self_attn.o_proj"),
      .q_norm = tensors.vector("self_attn.q_norm.weight"),
      .k_norm = tensors.vector("self_attn.k_norm.weight"),
  };
}

void GroupedAttentionBlock::record(Commands& commands, Scratch& scratch, const LayerState& state, Rows rows) const {
  const GroupedAttention& a = shape_;
  const Weights& w = weights_;
  const Room& s = room_;
  const Cache& keys = state[0].cache;
  const Cache& values = state[1].cache;
  commands.matmul(std::array{project(scratch.normed, w.q, s.q), project(scratch.normed, w.k, s.k),
                             project(scratch.normed, w.v, s.v)},
                  rows.n);

  // With a gate a head of q is [query | gate].
  const Heads q = {s.q, a.heads, a.head_dim, a.q_width(), a.q_head()};
  const Heads k = dense_heads(s.k, a.kv_heads, a.head_dim);
  commands.rms_norm_heads(q, w.q_norm, rows.n, stream_.eps, 1);
  commands.rms_norm_heads(k, w.k_norm, rows.n, stream_.eps, 1);
  commands.rope(q, s.angles, a.rope.dim / 2, false, rows.n);
  commands.rope(k, s.angles, a.rope.dim / 2, false, rows.n);
  commands.append(s.k, a.kv_width(), keys, rows.position, rows.n);
  commands.append(s.v, a.kv_width(), values, rows.position, rows.n);
  const auto scale = static_cast<float>(1 / std::sqrt(static_cast<double>(a.head_dim)));
  commands.attention({q, keys, values, a.kv_heads, rows.position, scale, s.mixed}, rows.n);
  if (a.gate) {
    const Heads gate = {s.q.at(a.head_dim), a.heads, a.head_dim, a.q_width(), a.q_head()};
    commands.sigmoid_gate(dense_heads(s.mixed, a.heads, a.head_dim), gate, rows.n);
  }
  commands.matmul(std::array{project(s.mixed, w.o, scratch.out)}, rows.n);
}

}  // namespace moeflux
