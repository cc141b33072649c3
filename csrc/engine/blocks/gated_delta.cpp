#include "engine/blocks/gated_delta.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "engine/blocks/recurrent_rows.h"

namespace moeflux {
void GatedDeltaBlock::place(ScratchLayout& layout) {
  const int64_t n = layout.rows();
  layout.place(room_.qkv, "qkv", n * shape_.channels());
  layout.place(room_.convolved, "convolved", n * shape_.channels());
  layout.place(room_.z, "z", n * shape_.value_width());
  layout.place(room_.alpha, "alpha", n * shape_.value_heads);
  layout.place(room_.b, "b", n * shape_.value_heads);
  layout.place(room_.decay, "decay", n * shape_.value_heads);
  layout.place(room_.beta, "beta", n * shape_.value_heads);
  layout.place(room_.mixed, "mixed", n * shape_.value_width());
}

void GatedDeltaBlock::want(WorkSizes& sizes, int64_t rows) const {
  sizes.inputs = std::max(sizes.inputs, rows * shape_.value_width());
  sizes.channels = std::max(sizes.channels, shape_.channels());
  sizes.key_dim = shape_.key_dim;
  sizes.delta_head = shape_.value_dim;
  sizes.delta_columns = shape_.value_width();
}

void GatedDeltaBlock::load(const LayerTensors& tensors) {
  weights_ = {
      .qkv = tensors.matrix("linear_attn.in_proj_qkv"),
      .z = tensors.matrix("linear_attn.in_proj_z"),
      .a = tensors.matrix("linear_attn.in_proj_a"),
      .b = tensors.matrix("linear_attn.in_proj_b"),
      .out = tensors.matrix("linear_attn.out_proj"),
      .conv = tensors.vector("linear_attn.conv1d.weight"),
      .a_log = tensors.vector("linear_attn.A_log"),
      .dt_bias = tensors.vector("linear_attn.dt_bias"),
      .norm = tensors.vector("linear_attn.norm.weight"),
  };
}

void GatedDeltaBlock::record(Commands& commands, Scratch& scratch, size_t layer, const Rows& rows) const {
  const GatedDelta& d = shape_;
  const Weights& w = weights_;
  const Room& s = room_;
  commands.matmul(std::array{project(scratch.normed, w.qkv, s.qkv), project(scratch.normed, w.z, s.z),
                             project(scratch.normed, w.a, s.alpha), project(scratch.normed, w.b, s.b)},
                  rows.n);
  for (const Piece& piece : rows.pieces) {
    const PlacedPiece& state = piece.state->layer(layer)[0];
    over_rows(commands, piece, state, [&](int64_t row, int64_t count) {
      const int64_t from = row * d.channels();
      commands.conv1d({s.qkv.at(from), d.channels(), d.taps, state.fixed, w.conv, s.convolved.at(from)}, count);
    });
  }

  // The convolved row is [query heads | key heads | value heads]. Query and key to length 1, the query also by
  // 1/sqrt(dim); the 1e-6 is added to the sum of squares, whatever the model's own eps.
  const auto dim = static_cast<float>(d.key_dim);
  const int64_t stride = d.channels();
  const Heads q = {s.convolved, d.key_heads, d.key_dim, stride, d.key_dim};
  const Heads k = {s.convolved.at(d.key_width()), d.key_heads, d.key_dim, stride, d.key_dim};
  const Heads value = {s.convolved.at(2 * d.key_width()), d.value_heads, d.value_dim, stride, d.value_dim};
  commands.rms_norm_heads(q, {}, rows.n, 1e-6f / dim, 1 / dim);
  commands.rms_norm_heads(k, {}, rows.n, 1e-6f / dim, 1 / std::sqrt(dim));

  commands.delta_gates({s.alpha, s.b, w.a_log, w.dt_bias, d.value_heads, s.decay, s.beta}, rows.n);
  for (const Piece& piece : rows.pieces) {
    const PlacedPiece& state = piece.state->layer(layer)[1];
    over_rows(commands, piece, state, [&](int64_t row, int64_t count) {
      const int64_t gate = row * d.value_heads;
      commands.gated_delta({from_row(q, row), from_row(k, row), from_row(value, row), s.decay.at(gate), s.beta.at(gate),
                            state.fixed, s.mixed.at(row * d.value_width()), d.tiled, state.has_room()},
                           count);
    });
  }
  const Heads mixed = dense_heads(s.mixed, d.value_heads, d.value_dim);
  const Heads z = dense_heads(s.z, d.value_heads, d.value_dim);
  if (d.sigmoid) {
    commands.rms_norm_heads(mixed, w.norm, rows.n, stream_.eps, 1);
    commands.sigmoid_gate(mixed, z, rows.n);
  } else {
    commands.gated_rms_norm(mixed, z, w.norm, rows.n, stream_.eps);
  }
  commands.matmul(std::array{project(s.mixed, w.out, scratch.out)}, rows.n);
}

}  // namespace moeflux
