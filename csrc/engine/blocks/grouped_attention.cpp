#include "engine/blocks/grouped_attention.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace moeflux {

GroupedAttentionBlock::GroupedAttentionBlock(const GroupedAttention& shape, const Stream& stream)
    : shape_(shape), stream_(stream) {
  if (shape.index) index_.emplace(*shape.index, shape.rope, stream.eps);
}

void GroupedAttentionBlock::place(ScratchLayout& layout) {
  if (index_) index_->place(layout, 2 * shape_.kv_width());
  const int64_t n = layout.rows();
  layout.place_angles(room_.angles, shape_.rope);
  layout.place(room_.q, "q", n * shape_.q_width());
  layout.place(room_.k, "k", n * shape_.kv_width());
  layout.place(room_.v, "v", n * shape_.kv_width());
  layout.place(room_.mixed, "mixed", n * shape_.out_width());
}

void GroupedAttentionBlock::want(WorkSizes& sizes, int64_t rows) const {
  sizes.value_dim = std::max(sizes.value_dim, shape_.head_dim);
  sizes.value_dims.push_back(shape_.head_dim);
  sizes.selects = sizes.selects || shape_.index;
  sizes.heads = std::max(sizes.heads, shape_.heads);
  sizes.inputs = std::max(sizes.inputs, rows * shape_.out_width());
}

void GroupedAttentionBlock::load(const LayerTensors& tensors) {
  Weights& w = weights_;
  w.q = tensors.matrix("self_attn.q_proj");
  w.k = tensors.matrix("self_attn.k_proj");
  if (!shape_.keys_as_values) w.v = tensors.matrix("self_attn.v_proj");
  w.o = tensors.matrix("self_attn.o_proj");
  if (shape_.qk_norm) {
    w.q_norm = tensors.vector("self_attn.q_norm.weight");
    w.k_norm = tensors.vector("self_attn.k_norm.weight");
  }
  if (shape_.bias) {
    w.q_bias = tensors.vector("self_attn.q_proj.bias");
    w.k_bias = tensors.vector("self_attn.k_proj.bias");
    if (!shape_.keys_as_values) w.v_bias = tensors.vector("self_attn.v_proj.bias");
  }
  if (shape_.out_bias) w.o_bias = tensors.vector("self_attn.o_proj.bias");
  if (shape_.sinks) w.sinks = tensors.vector("self_attn.sinks");
  if (index_) index_->load(tensors);
  if (shape_.out_norm) w.out_norm = tensors.vector("post_attention_layernorm.weight");
}

// As they are before norms and rope.
void GroupedAttentionBlock::record_products(Commands& commands, const Scratch& scratch, int64_t n, bool queries) const {
  const GroupedAttention& a = shape_;
  const Weights& w = weights_;
  const Room& s = room_;
  std::array<Product, 3> products = {project(scratch.normed, w.q, s.q), project(scratch.normed, w.k, s.k)};
  size_t count = 2;
  if (!a.keys_as_values) products[count++] = project(scratch.normed, w.v, s.v);
  commands.matmul(std::span(products).first(count).subspan(queries ? 0 : 1), n);
  if (a.bias) {
    if (queries) commands.bias_add(s.q, w.q_bias, n, a.q_width());
    commands.bias_add(s.k, w.k_bias, n, a.kv_width());
    if (!a.keys_as_values) commands.bias_add(s.v, w.v_bias, n, a.kv_width());
  }
  if (a.keys_as_values) commands.copy(s.k, s.v, n * a.kv_width() * 4);
}

// With a gate a head of q is [query | gate].
Heads GroupedAttentionBlock::queries() const {
  return {room_.q, shape_.heads, shape_.head_dim, shape_.q_width(), shape_.q_head()};
}

void GroupedAttentionBlock::record_rows(Commands& commands, const Scratch& scratch, size_t layer, const Rows& rows,
                                        bool queries) const {
  const GroupedAttention& a = shape_;
  const Weights& w = weights_;
  const Room& s = room_;
  record_products(commands, scratch, rows.n, queries);

  const Heads q = this->queries();
  const Heads k = dense_heads(s.k, a.kv_heads, a.head_dim);
  if (a.joint_norm) {
    if (queries) commands.rms_norm(s.q, w.q_norm, s.q, rows.n, a.q_width(), stream_.eps);
    commands.rms_norm(s.k, w.k_norm, s.k, rows.n, a.kv_width(), stream_.eps);
  } else if (a.qk_norm) {
    if (queries) commands.rms_norm_heads(q, w.q_norm, rows.n, stream_.eps, 1);
    commands.rms_norm_heads(k, w.k_norm, rows.n, stream_.eps, 1);
  }
  if (a.value_norm) commands.rms_norm_heads(dense_heads(s.v, a.kv_heads, a.head_dim), {}, rows.n, stream_.eps, 1);
  if (queries) commands.rope(q, s.angles, a.rope.dim / 2, false, rows.n);
  commands.rope(k, s.angles, a.rope.dim / 2, false, rows.n);
  if (index_) index_->record(commands, scratch, rows);
  // The same op for all sessions, before the next: a device may do it at once.
  const std::array kept = {s.k, s.v};
  for (size_t i = 0; i < kept.size(); ++i)
    for (const Piece& piece : rows.pieces)
      commands.append(kept[i].at(piece.first * a.kv_width()), a.kv_width(), piece.state->layer(layer)[i].rows,
                      piece.position, piece.rows());
}

void GroupedAttentionBlock::keep(Commands& commands, Scratch& scratch, size_t layer, const Rows& rows) const {
  if (index_) return record(commands, scratch, layer, rows);  // its keys are kept as it selects
  record_rows(commands, scratch, layer, rows, false);
}

void GroupedAttentionBlock::record(Commands& commands, Scratch& scratch, size_t layer, const Rows& rows) const {
  const GroupedAttention& a = shape_;
  const Weights& w = weights_;
  const Room& s = room_;
  record_rows(commands, scratch, layer, rows, true);
  const auto scale = static_cast<float>(a.scale > 0 ? a.scale : 1 / std::sqrt(static_cast<double>(a.head_dim)));
  for (const Piece& piece : rows.pieces) {
    const LayerState& state = piece.state->layer(layer);
    const Cache& keys = state[0].rows;
    const Cache& values = state[1].rows;
    const auto attend = [&](const AttendingRows& some) {
      const int64_t first = piece.first + some.first;
      commands.attention({from_row(queries(), first), some.cached[0], some.cached[1], a.kv_heads, some.position, scale,
                          s.mixed.at(first * a.out_width()), w.sinks, a.window},
                         some.count);
    };
    if (index_)
      index_->select(commands, piece, state, {keys, values}, attend);
    else
      attend({0, piece.rows(), piece.position, {keys, values}});
  }
  if (a.gate) {
    const Heads gate = {s.q.at(a.head_dim), a.heads, a.head_dim, a.q_width(), a.q_head()};
    commands.sigmoid_gate(dense_heads(s.mixed, a.heads, a.head_dim), gate, rows.n);
  }
  commands.matmul(std::array{project(s.mixed, w.o, scratch.out)}, rows.n);
  if (a.out_bias) commands.bias_add(scratch.out, w.o_bias, rows.n, stream_.width);
  if (a.out_norm) commands.rms_norm(scratch.out, w.out_norm, scratch.out, rows.n, stream_.width, stream_.eps);
}

}  // namespace moeflux
