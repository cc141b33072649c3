#include "format/tensor_requirements.h"

#include "core/error.h"

namespace moeflux {
namespace {

using Has = std::function<bool(const std::string&)>;

class Requirements {
 public:
  Requirements(const Variant& variant, const Has& has) : v(variant), has_(has) {}

  std::vector<TensorRequirement> collect() {
    const int64_t h = v.hidden_size;
    matrix("model.embed_tokens", v.vocab_size, h);
    for (int64_t layer = 0; layer < v.num_layers(); ++layer) {
      prefix_ = layer_prefix(layer);
      vector("input_layernorm.weight", h);
      vector("post_attention_layernorm.weight", h);
      if (!v.is_full(layer))
        linear_attention();
      else if (v.attention == Attention::gqa)
        grouped_attention();
      else
        latent_attention();
      if (v.is_moe(layer))
        router_and_shared_expert();
      else
        gated_mlp("mlp.", v.dense_intermediate);
    }
    prefix_.clear();
    vector("model.norm.weight", h);
    if (!v.tied_embeddings) matrix("lm_head", v.vocab_size, h);
    return std::move(list_);
  }

 private:
  void add(std::string_view name, TensorKind kind, std::vector<int64_t> shape) {
    list_.push_back({concat(prefix_, name), kind, std::move(shape)});
  }
  void vector(std::string_view name, int64_t size) { add(name, TensorKind::vector, {size}); }
  void matrix(std::string_view name, int64_t rows, int64_t columns) { add(name, TensorKind::matrix, {rows, columns}); }

  void grouped_attention() {
    matrix("self_attn.q_proj", v.q_proj_out(), v.hidden_size);
    matrix("self_attn.k_proj", v.kv_dim(), v.hidden_size);
    matrix("self_attn.v_proj", v.kv_dim(), v.hidden_size);
    matrix("self_attn.o_proj", v.hidden_size, v.o_proj_in());
    vector("self_attn.q_norm.weight", v.head_dim);
    vector("self_attn.k_norm.weight", v.head_dim);
  }

  void linear_attention() {
    matrix("linear_attn.in_proj_qkv", v.conv_channels(), v.hidden_size);
    matrix("linear_attn.in_proj_z", v.linear_total_value(), v.hidden_size);
    matrix("linear_attn.in_proj_b", v.linear_value_heads, v.hidden_size);
    matrix("linear_attn.in_proj_a", v.linear_value_heads, v.hidden_size);
    matrix("linear_attn.out_proj", v.hidden_size, v.linear_total_value());
    add("linear_attn.conv1d.weight", TensorKind::conv, {v.conv_channels(), v.conv_kernel, 1});
    vector("linear_attn.A_log", v.linear_value_heads);
    vector("linear_attn.dt_bias", v.linear_value_heads);
    vector("linear_attn.norm.weight", v.linear_value_dim);
  }

  void latent_attention() {
    const int64_t q_out = v.num_heads * v.head_dim;
    if (v.q_lora_rank > 0) {
      matrix("self_attn.q_a_proj", v.q_lora_rank, v.hidden_size);
      vector("self_attn.q_a_layernorm.weight", v.q_lora_rank);
      matrix("self_attn.q_b_proj", q_out, v.q_lora_rank);
    } else {
      matrix("self_attn.q_proj", q_out, v.hidden_size);
    }
    matrix("self_attn.kv_a_proj_with_mqa", v.kv_a_out(), v.hidden_size);
    vector("self_attn.kv_a_layernorm.weight", v.kv_lora_rank);
    const bool split = has_(prefix_ + "self_attn.embed_q.weight") || has_(prefix_ + "self_attn.unembed_out.weight");
    if (split) {
      add("self_attn.embed_q", TensorKind::stack, {v.num_heads, v.kv_lora_rank, v.qk_nope_dim});
      add("self_attn.unembed_out", TensorKind::stack, {v.num_heads, v.v_head_dim, v.kv_lora_rank});
    } else {
      matrix("self_attn.kv_b_proj", v.kv_b_out(), v.kv_lora_rank);
    }
    matrix("self_attn.o_proj", v.hidden_size, v.o_proj_in());
  }

  void router_and_shared_expert() {
    matrix("mlp.gate", v.num_experts, v.hidden_size);
    if (v.router == Router::noaux_tc) vector("mlp.gate.e_score_correction_bias", v.num_experts);
    if (v.shared_expert == SharedExpert::gated) {
      matrix("mlp.shared_expert_gate", 1, v.hidden_size);
      gated_mlp("mlp.shared_expert.", v.shared_intermediate);
    } else if (v.shared_expert == SharedExpert::plain) {
      gated_mlp("mlp.shared_experts.", v.shared_intermediate);
    }
  }

  void gated_mlp(const std::string& name, int64_t intermediate) {
    matrix(name + "gate_proj", intermediate, v.hidden_size);
    matrix(name + "up_proj", intermediate, v.hidden_size);
    matrix(name + "down_proj", v.hidden_size, intermediate);
  }

  const Variant& v;
  const Has& has_;
  std::string prefix_;  // of the layer at hand
  std::vector<TensorRequirement> list_;
};

// The number in "model.layers.<number>.", -1 for any other name.
int64_t layer_of(std::string_view name) {
  constexpr std::string_view prefix = "model.layers.";
  constexpr size_t most_digits = 9;
  if (!name.starts_with(prefix)) return -1;
  const std::string_view rest = name.substr(prefix.size());
  const size_t digits = rest.find('.');
  if (digits == 0 || digits == std::string_view::npos || digits > most_digits) return -1;
  int64_t layer = 0;
  for (char c : rest.substr(0, digits)) {
    if (c < '0' || c > '9') return -1;
    layer = layer * 10 + (c - '0');
  }
  return layer;
}

}  // namespace

std::vector<TensorRequirement> tensor_requirements(const Variant& variant, const Has& has) {
  return Requirements(variant, has).collect();
}

std::string canonical_name(std::string_view stored) {
  constexpr std::string_view first = "language_model.";
  constexpr std::string_view second = "model.language_model.";
  if (stored.starts_with(first)) return std::string(stored.substr(first.size()));
  if (stored.starts_with(second)) return concat("model.", stored.substr(second.size()));
  return std::string(stored);
}

bool is_unused_tensor(const Variant& variant, std::string_view canonical) {
  for (std::string_view start : {"vision_tower", "model.visual", "visual.", "mtp.", "model.mtp."})
    if (canonical.starts_with(start)) return true;
  if (canonical.ends_with(".rotary_emb.inv_freq")) return true;
  if (variant.tied_embeddings && canonical.starts_with("lm_head.")) return true;
  // DeepSeek numbers its multi-token prediction layers after the others.
  return variant.model_type == ModelType::deepseek_v3 && layer_of(canonical) >= variant.num_layers();
}

std::string layer_prefix(int64_t layer) { return concat("model.layers.", layer, "."); }

}  // namespace moeflux
