#include "engine/attention_side.h"

#include <array>
#include <cmath>

namespace moeflux {
namespace {

// The norms inside latent attention have an eps of their own, whatever the model's.
constexpr float latent_eps = 1e-6f;

// Heads that stand side by side with nothing between.
Heads dense_heads(View view, int64_t heads, int64_t dim) { return {view, heads, dim, heads * dim, dim}; }

Product project(View x, const Matrix& matrix, View out) { return {x, matrix.columns, matrix, out, matrix.rows}; }

void record_linear(Commands& commands, const Model& model, const LinearAttentionWeights& w, const LayerState& state,
                   Scratch& s, int64_t n) {
  const Variant& v = model.variant;
  const std::array products = {project(s.normed, w.qkv, s.qkv), project(s.normed, w.z, s.z),
                               project(s.normed, w.a, s.alpha), project(s.normed, w.b, s.b)};
  commands.matmul(products, n);
  commands.conv1d({s.qkv, v.conv_channels(), v.conv_kernel, state.conv, w.conv, s.convolved}, n);

  // The convolved row is [query heads | key heads | value heads]. Query and key to length 1, the query also by
  // 1/sqrt(dim); the 1e-6 is added to the sum of squares, whatever the model's own eps.
  const auto dim = static_cast<float>(v.linear_key_dim);
  const int64_t stride = v.conv_channels();
  const Heads q = {s.convolved, v.linear_key_heads, v.linear_key_dim, stride, v.linear_key_dim};
  const Heads k = {s.convolved.at(v.linear_total_key()), v.linear_key_heads, v.linear_key_dim, stride,
                   v.linear_key_dim};
  const Heads value = {s.convolved.at(2 * v.linear_total_key()), v.linear_value_heads, v.linear_value_dim, stride,
                       v.linear_value_dim};
  commands.rms_norm_heads(q, {}, n, 1e-6f / dim, 1 / dim);
  commands.rms_norm_heads(k, {}, n, 1e-6f / dim, 1 / std::sqrt(dim));

  commands.delta_gates({s.alpha, s.b, w.a_log, w.dt_bias, v.linear_value_heads, s.decay, s.beta}, n);
  commands.gated_delta({q, k, value, s.decay, s.beta, state.recurrent, s.mixed}, n);
  commands.gated_rms_norm(dense_heads(s.mixed, v.linear_value_heads, v.linear_value_dim),
                          dense_heads(s.z, v.linear_value_heads, v.linear_value_dim), w.norm, n, model.eps());
  commands.matmul(std::array{project(s.mixed, w.out, s.out)}, n);
}

void record_full(Commands& commands, const Model& model, const FullAttentionWeights& w, const LayerState& state,
                 Scratch& s, Rows rows) {
  const Variant& v = model.variant;
  const std::array products = {project(s.normed, w.q, s.q), project(s.normed, w.k, s.k), project(s.normed, w.v, s.v)};
  commands.matmul(products, rows.n);

  // With a gate a head of q is [query | gate].
  const int64_t stride = v.head_dim * (v.attention_gate ? 2 : 1);
  const Heads q = {s.q, v.num_heads, v.head_dim, v.num_heads * stride, stride};
  const Heads k = dense_heads(s.k, v.num_kv_heads, v.head_dim);
  commands.rms_norm_heads(q, w.q_norm, rows.n, model.eps(), 1);
  commands.rms_norm_heads(k, w.k_norm, rows.n, model.eps(), 1);
  commands.rope(q, s.angles, v.rotary_dim / 2, false, rows.n);
  commands.rope(k, s.angles, v.rotary_dim / 2, false, rows.n);
  commands.append(s.k, v.kv_dim(), state.k, rows.position, rows.n);
  commands.append(s.v, v.kv_dim(), state.v, rows.position, rows.n);
  commands.attention({q, state.k, state.v, v.num_kv_heads, rows.position, model.softmax_scale, s.mixed}, rows.n);
  if (v.attention_gate) {
    const Heads gate = {s.q.at(v.head_dim), v.num_heads, v.head_dim, v.num_heads * stride, stride};
    commands.sigmoid_gate(dense_heads(s.mixed, v.num_heads, v.head_dim), gate, rows.n);
  }
  commands.matmul(std::array{project(s.mixed, w.o, s.out)}, rows.n);
}

// Head by head: the queries' unrotated part into the latent space, or (`out_of`) the weighted latents out of it.
void record_latent_map(Commands& commands, const Variant& v, const LatentAttentionWeights& w, Scratch& s, bool out_of,
                       int64_t n) {
  const int64_t rank = v.kv_lora_rank;
  const int64_t pair = v.qk_nope_dim + v.v_head_dim;  // rows of kv_b a head
  s.products.clear();
  for (int64_t head = 0; head < v.num_heads; ++head) {
    if (out_of) {
      const Matrix matrix = w.unembed_out.rows ? w.unembed_out.slice(head * v.v_head_dim, v.v_head_dim)
                                               : w.kv_b.slice(head * pair + v.qk_nope_dim, v.v_head_dim);
      s.products.push_back(
          {s.latents.at(head * rank), v.num_heads * rank, matrix, s.mixed.at(head * v.v_head_dim), v.o_proj_in()});
      continue;
    }
    const bool stacked = w.embed_q.rows != 0;
    const Matrix matrix = stacked ? w.embed_q.slice(head * rank, rank) : w.kv_b.slice(head * pair, v.qk_nope_dim);
    s.products.push_back(
        {s.q.at(head * v.head_dim), v.q_proj_out(), matrix, s.q_latent.at(head * rank), v.num_heads * rank, !stacked});
  }
  commands.matmul(s.products, n);
}

void record_latent(Commands& commands, const Model& model, const LatentAttentionWeights& w, const LayerState& state,
                   Scratch& s, Rows rows) {
  const Variant& v = model.variant;
  if (v.q_lora_rank) {
    commands.matmul(std::array{project(s.normed, w.q_a, s.q_low), project(s.normed, w.kv_a, s.kv)}, rows.n);
    commands.rms_norm(s.q_low, w.q_a_norm, s.q_low, rows.n, v.q_lora_rank, latent_eps);
    commands.matmul(std::array{project(s.q_low, w.q_b, s.q)}, rows.n);
  } else {
    commands.matmul(std::array{project(s.normed, w.q_b, s.q), project(s.normed, w.kv_a, s.kv)}, rows.n);
  }

  // A row of kv is [latent | rotated key]; a head of q is [unrotated | rotated].
  const int64_t width = v.kv_a_out();
  const Heads latent = {s.kv, 1, v.kv_lora_rank, width, v.kv_lora_rank};
  const Heads k_pe = {s.kv.at(v.kv_lora_rank), 1, v.qk_rope_dim, width, v.qk_rope_dim};
  const Heads q_pe = {s.q.at(v.qk_nope_dim), v.num_heads, v.qk_rope_dim, v.q_proj_out(), v.head_dim};
  commands.rms_norm_heads(latent, w.kv_a_norm, rows.n, latent_eps, 1);
  commands.rope(q_pe, s.angles, v.rotary_dim / 2, true, rows.n);
  commands.rope(k_pe, s.angles, v.rotary_dim / 2, true, rows.n);
  commands.append(latent.view, width, state.latent, rows.position, rows.n);
  commands.append(k_pe.view, width, state.rope_k, rows.position, rows.n);

  record_latent_map(commands, v, w, s, false, rows.n);
  commands.mla_attention({dense_heads(s.q_latent, v.num_heads, v.kv_lora_rank), q_pe, state.latent, state.rope_k,
                          rows.position, model.softmax_scale, s.latents},
                         rows.n);
  record_latent_map(commands, v, w, s, true, rows.n);
  commands.matmul(std::array{project(s.mixed, w.o, s.out)}, rows.n);
}

}  // namespace

void record_attention_side(Commands& commands, const Model& model, int64_t layer, const LayerState& state,
                           Scratch& scratch, Rows rows) {
  const Variant& v = model.variant;
  const LayerWeights& weights = model.weights.layers[static_cast<size_t>(layer)];
  commands.rms_norm(scratch.hidden, weights.input_norm, scratch.normed, rows.n, v.hidden_size, model.eps());
  if (!v.is_full(layer))
    record_linear(commands, model, weights.linear, state, scratch, rows.n);
  else if (v.attention == Attention::mla)
    record_latent(commands, model, weights.latent, state, scratch, rows);
  else
    record_full(commands, model, weights.full, state, scratch, rows);
  commands.residual_add(scratch.hidden, scratch.out, scratch.hidden, rows.n * v.hidden_size);
}

}  // namespace moeflux
