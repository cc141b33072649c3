#include "engine/blocks/latent_attention.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "engine/rope_angles.h"

namespace moeflux {
namespace {

// The norms inside latent attention have an eps of their own, whatever the model's.
constexpr float latent_eps = 1e-6f;

float score_scale(const LatentAttention& shape) {
  const double magnitude = rope_score_magnitude(shape.rope);
  return static_cast<float>(1 / std::sqrt(static_cast<double>(shape.head_dim())) * magnitude * magnitude);
}

}  // namespace

void LatentAttentionBlock::place(ScratchLayout& layout) {
  const int64_t n = layout.rows();
  layout.place_angles(room_.angles, shape_.rope);
  layout.place(room_.q, "q", n * shape_.q_width());
  layout.place(room_.q_low, "q_low", n * shape_.q_rank);
  layout.place(room_.kv, "kv", n * shape_.kv_a_width());
  layout.place(room_.q_latent, "q_latent", n * shape_.heads * shape_.kv_rank);
  layout.place(room_.latents, "latents", n * shape_.heads * shape_.kv_rank);
  layout.place(room_.mixed, "mixed", n * shape_.out_width());
  if (!shape_.index) return;
  layout.place(room_.index_q, "index_q", n * shape_.index->heads * shape_.index->dim);
  layout.place(room_.index_k, "index_k", n * shape_.index->dim);
  layout.place(room_.index_weights, "index_weights", n * shape_.index->heads);
  selection_->place(layout, shape_.kv_rank + shape_.rope.dim);
}

void LatentAttentionBlock::want(WorkSizes& sizes, int64_t rows) const {
  sizes.value_dim = std::max(sizes.value_dim, shape_.kv_rank);
  sizes.value_dims.push_back(shape_.kv_rank);
  sizes.by_head = true;
  sizes.selects = sizes.selects || shape_.index;
  sizes.heads = std::max(sizes.heads, shape_.heads);
  // There is a product for each head, with rows of its own.
  sizes.products = std::max(sizes.products, shape_.heads);
  sizes.input_rows = std::max(sizes.input_rows, rows * shape_.heads);
  sizes.inputs = std::max({sizes.inputs, rows * shape_.q_width(), rows * shape_.q_rank,
                           rows * shape_.heads * shape_.kv_rank, rows * shape_.out_width()});
}

void LatentAttentionBlock::load(const LayerTensors& tensors) {
  Weights& w = weights_;
  if (shape_.q_rank) {
    w.q_a = tensors.matrix("self_attn.q_a_proj");
    w.q_a_norm = tensors.vector("self_attn.q_a_layernorm.weight");
  }
  w.q_b = tensors.matrix(shape_.q_rank ? "self_attn.q_b_proj" : "self_attn.q_proj");
  w.kv_a = tensors.matrix("self_attn.kv_a_proj_with_mqa");
  w.kv_a_norm = tensors.vector("self_attn.kv_a_layernorm.weight");
  if (tensors.has_matrix("self_attn.kv_b_proj")) {
    w.kv_b = tensors.matrix("self_attn.kv_b_proj");
  } else {
    w.embed_q = tensors.matrix("self_attn.embed_q");
    w.unembed_out = tensors.matrix("self_attn.unembed_out");
  }
  w.o = tensors.matrix("self_attn.o_proj");
  if (!shape_.index) return;
  w.index_q = tensors.matrix("self_attn.indexer.wq_b");
  w.index_k = tensors.matrix("self_attn.indexer.wk");
  w.index_norm = tensors.vector("self_attn.indexer.k_norm.weight");
  w.index_norm_bias = tensors.vector("self_attn.indexer.k_norm.bias");
  w.index_weights = tensors.matrix("self_attn.indexer.weights_proj");
}

void LatentAttentionBlock::record(Commands& commands, Scratch& scratch, size_t layer, const Rows& rows) const {
  const LatentAttention& a = shape_;
  const Room& s = room_;
  const bool selects =
      selection_ && std::ranges::any_of(rows.pieces, [&](const Piece& piece) { return selection_->selects(piece); });
  record_queries_and_latent(commands, scratch, rows.n, selects);
  record_turns(commands, rows.n, true, selects);

  std::vector<Product>& products = scratch.products;
  products.clear();
  for (int64_t head = 0; head < a.heads; ++head) products.push_back(into_latent(head));
  commands.matmul(products, rows.n);
  append(commands, layer, rows);
  for (const Piece& piece : rows.pieces) {
    const LayerState& state = piece.state->layer(layer);
    record_attention(commands, piece, {state[0].rows, state[1].rows}, state);
  }
  products.clear();
  for (int64_t head = 0; head < a.heads; ++head) products.push_back(out_of_latent(head));
  commands.matmul(products, rows.n);
  commands.matmul(std::array{project(s.mixed, weights_.o, scratch.out)}, rows.n);
}

void LatentAttentionBlock::keep(Commands& commands, Scratch& scratch, size_t layer, const Rows& rows) const {
  const std::array products = {project(scratch.normed, weights_.kv_a, room_.kv),
                               project(scratch.normed, weights_.index_k, room_.index_k)};
  commands.matmul(std::span(products).first(shape_.index ? 2 : 1), rows.n);
  record_turns(commands, rows.n, false, false);
  append(commands, layer, rows);
}

void LatentAttentionBlock::record_turns(Commands& commands, int64_t n, bool queries, bool selects) const {
  const int64_t pairs = shape_.rope.dim / 2;
  commands.rms_norm_heads(latent(), weights_.kv_a_norm, n, latent_eps, 1);
  if (queries) commands.rope(rotated_queries(), room_.angles, pairs, true, n);
  commands.rope(rotated_key(), room_.angles, pairs, true, n);
  if (shape_.index) record_index(commands, n, selects);
}

void LatentAttentionBlock::append(Commands& commands, size_t layer, const Rows& rows) const {
  // The same op for all sessions, before the next: a device may do it at once.
  const auto add = [&](const Heads& x, size_t kind) {
    for (const Piece& piece : rows.pieces)
      commands.append(from_row(x, piece.first).view, x.row_stride, piece.state->layer(layer)[kind].rows, piece.position,
                      piece.rows());
  };
  add(latent(), 0);
  add(rotated_key(), 1);
  if (shape_.index) add(dense_heads(room_.index_k, 1, shape_.index->dim), 2);
}

Heads LatentAttentionBlock::latent() const {
  return {room_.kv, 1, shape_.kv_rank, shape_.kv_a_width(), shape_.kv_rank};
}

Heads LatentAttentionBlock::rotated_key() const {
  return {room_.kv.at(shape_.kv_rank), 1, shape_.rope.dim, shape_.kv_a_width(), shape_.rope.dim};
}

Heads LatentAttentionBlock::rotated_queries() const {
  const LatentAttention& a = shape_;
  return {room_.q.at(a.nope_dim), a.heads, a.rope.dim, a.q_width(), a.head_dim()};
}

void LatentAttentionBlock::record_queries_and_latent(Commands& commands, const Scratch& scratch, int64_t n,
                                                     bool selects) const {
  const Weights& w = weights_;
  const Room& s = room_;
  const Product kv = project(scratch.normed, w.kv_a, s.kv);
  if (!shape_.q_rank) {
    commands.matmul(std::array{project(scratch.normed, w.q_b, s.q), kv}, n);
    return;
  }
  const std::array of_stream = {project(scratch.normed, w.q_a, s.q_low), kv,
                                project(scratch.normed, w.index_k, s.index_k),
                                project(scratch.normed, w.index_weights, s.index_weights)};
  const std::array of_low = {project(s.q_low, w.q_b, s.q), project(s.q_low, w.index_q, s.index_q)};
  commands.matmul(std::span(of_stream).first(selects ? 4 : shape_.index ? 3 : 2), n);
  commands.rms_norm(s.q_low, w.q_a_norm, s.q_low, n, shape_.q_rank, latent_eps);
  commands.matmul(std::span(of_low).first(selects ? 2 : 1), n);
}

void LatentAttentionBlock::record_index(Commands& commands, int64_t n, bool selects) const {
  const Index& index = *shape_.index;
  const int64_t turning = shape_.rope.dim;
  const auto turned = [&](View view, int64_t heads) {  // the first channels of each
    return Heads{view, heads, turning, heads * index.dim, index.dim};
  };
  commands.layer_norm(room_.index_k, weights_.index_norm, weights_.index_norm_bias, n, index.dim, latent_eps);
  commands.rope(turned(room_.index_k, 1), room_.angles, turning / 2, index.interleaved, n);
  if (selects) commands.rope(turned(room_.index_q, index.heads), room_.angles, turning / 2, index.interleaved, n);
}

void LatentAttentionBlock::record_attention(Commands& commands, const Piece& piece, const RowPair& cached,
                                            const LayerState& state) const {
  const LatentAttention& a = shape_;
  const Room& s = room_;
  const auto attend = [&](const AttendingRows& rows) {
    const int64_t first = piece.first + rows.first;
    commands.mla_attention(
        {from_row(dense_heads(s.q_latent, a.heads, a.kv_rank), first), from_row(rotated_queries(), first),
         rows.cached[0], rows.cached[1], rows.position, score_scale(a), s.latents.at(first * a.heads * a.kv_rank)},
        rows.count);
  };
  if (!selection_) return attend({0, piece.rows(), piece.position, cached});
  const Index& index = *a.index;
  IndexScoresArgs scores;
  scores.q = from_row(dense_heads(s.index_q, index.heads, index.dim), piece.first);
  scores.weights = s.index_weights.at(piece.first * index.heads);
  scores.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(index.heads * index.dim)));
  scores.keys = state[2].rows;
  selection_->record(commands, piece, scores, cached, attend);
}

// Takes the unrotated part of a head's query into the latent space.
Product LatentAttentionBlock::into_latent(int64_t head) const {
  const LatentAttention& a = shape_;
  const bool stacked = weights_.embed_q.rows != 0;
  const Matrix matrix = stacked ? weights_.embed_q.slice(head * a.kv_rank, a.kv_rank)
                                : weights_.kv_b.slice(head * a.kv_b_head(), a.nope_dim);
  return {room_.q.at(head * a.head_dim()),     a.q_width(),         matrix,
          room_.q_latent.at(head * a.kv_rank), a.heads * a.kv_rank, !stacked};
}

// Takes a head's weighted latents out of it.
Product LatentAttentionBlock::out_of_latent(int64_t head) const {
  const LatentAttention& a = shape_;
  const Matrix matrix = weights_.unembed_out.rows ? weights_.unembed_out.slice(head * a.v_dim, a.v_dim)
                                                  : weights_.kv_b.slice(head * a.kv_b_head() + a.nope_dim, a.v_dim);
  return {room_.latents.at(head * a.kv_rank), a.heads * a.kv_rank, matrix, room_.mixed.at(head * a.v_dim),
          a.out_width()};
}

}  // namespace moeflux
