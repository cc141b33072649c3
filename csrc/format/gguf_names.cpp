#include "format/gguf_names.h"

#include <array>
#include <utility>

#include "core/error.h"
#include "format/tensor_requirements.h"

namespace moeflux {
namespace {

using Name = std::pair<std::string_view, std::string_view>;

constexpr std::array<Name, 3> names_outside = {{{"token_embd.weight", "model.embed_tokens.weight"},
                                                {"output_norm.weight", "model.norm.weight"},
                                                {"output.weight", "lm_head.weight"}}};

// Names within a layer that stand before .weight or .bias, or end there.
constexpr std::array<Name, 37> names_inside = {{
    {"attn_norm", "input_layernorm"},
    {"ffn_norm", "post_attention_layernorm"},
    {"post_attention_norm", "post_attention_layernorm"},
    {"attn_q", "self_attn.q_proj"},
    {"attn_k", "self_attn.k_proj"},
    {"attn_v", "self_attn.v_proj"},
    {"attn_output", "self_attn.o_proj"},
    {"attn_q_norm", "self_attn.q_norm"},
    {"attn_k_norm", "self_attn.k_norm"},
    {"attn_q_a", "self_attn.q_a_proj"},
    {"attn_q_b", "self_attn.q_b_proj"},
    {"attn_q_a_norm", "self_attn.q_a_layernorm"},
    {"attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"},
    {"attn_kv_a_norm", "self_attn.kv_a_layernorm"},
    {"attn_kv_b", "self_attn.kv_b_proj"},
    {"attn_k_b", "self_attn.embed_q"},
    {"attn_v_b", "self_attn.unembed_out"},
    {"attn_qkv", "linear_attn.in_proj_qkv"},
    {"attn_gate", "linear_attn.in_proj_z"},
    {"ssm_ba", "linear_attn.in_proj_ba"},
    {"ssm_beta", "linear_attn.in_proj_b"},
    {"ssm_alpha", "linear_attn.in_proj_a"},
    {"ssm_conv1d", "linear_attn.conv1d"},
    {"ssm_norm", "linear_attn.norm"},
    {"ssm_out", "linear_attn.out_proj"},
    {"ffn_gate_inp", "mlp.gate"},
    {"ffn_gate_inp_shexp", "mlp.shared_expert_gate"},
    {"ffn_gate", "mlp.gate_proj"},
    {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"},
    {"ffn_gate_exps", "mlp.switch_mlp.gate_proj"},
    {"ffn_up_exps", "mlp.switch_mlp.up_proj"},
    {"ffn_down_exps", "mlp.switch_mlp.down_proj"},
    {"ffn_gate_up_exps", "mlp.switch_mlp.gate_up_proj"},
    {"ffn_gate_shexp", "gate_proj"},
    {"ffn_up_shexp", "up_proj"},
    {"ffn_down_shexp", "down_proj"},
}};

// Names within a layer that are whole.
constexpr std::array<Name, 4> whole_names = {{{"ssm_a", "linear_attn.A_log"},
                                              {"ssm_dt.bias", "linear_attn.dt_bias"},
                                              {"attn_sinks.weight", "self_attn.sinks"},
                                              {"exp_probs_b.bias", "mlp.gate.e_score_correction_bias"}}};

// Of gemma4, whose layers have norms before and after each part.
constexpr std::array<Name, 5> names_inside_gemma4 = {{{"ffn_norm", "pre_feedforward_layernorm"},
                                                      {"post_ffw_norm", "post_feedforward_layernorm"},
                                                      {"pre_ffw_norm_2", "pre_feedforward_layernorm_2"},
                                                      {"post_ffw_norm_1", "post_feedforward_layernorm_1"},
                                                      {"post_ffw_norm_2", "post_feedforward_layernorm_2"}}};
constexpr std::array<Name, 3> whole_names_of_gemma4 = {{{"layer_output_scale.weight", "layer_scalar"},
                                                        {"ffn_gate_inp.scale", "router.scale"},
                                                        {"ffn_down_exps.scale", "router.per_expert_scale"}}};

template <size_t count>
std::optional<std::string_view> find(const std::array<Name, count>& names, std::string_view stored) {
  for (const auto& [own, canonical] : names)
    if (own == stored) return canonical;
  return std::nullopt;
}

constexpr std::string_view block_prefix = "blk.";

}  // namespace

int64_t layer_of_gguf(std::string_view stored) {
  constexpr size_t max_digits = 9;
  if (!stored.starts_with(block_prefix)) return -1;
  const std::string_view rest = stored.substr(block_prefix.size());
  const size_t digits = rest.find('.');
  if (digits == 0 || digits == std::string_view::npos || digits > max_digits) return -1;
  int64_t layer = 0;
  for (const char c : rest.substr(0, digits)) {
    if (c < '0' || c > '9') return -1;
    layer = layer * 10 + (c - '0');
  }
  return layer;
}

std::optional<std::string> name_of_gguf(const Variant& variant, std::string_view stored) {
  if (const auto found = find(names_outside, stored)) return std::string(*found);
  const int64_t layer = layer_of_gguf(stored);
  if (layer < 0) return std::nullopt;
  const std::string_view rest = stored.substr(stored.find('.', block_prefix.size()) + 1);
  const bool gemma4 = variant.model_type == ModelType::gemma4;
  auto found = gemma4 ? find(whole_names_of_gemma4, rest) : std::nullopt;
  if (!found) found = find(whole_names, rest);
  if (found) return concat(layer_prefix(layer), *found);
  const size_t dot = rest.rfind('.');
  if (dot == std::string_view::npos) return std::nullopt;
  if (gemma4) found = find(names_inside_gemma4, rest.substr(0, dot));
  if (!found) found = find(names_inside, rest.substr(0, dot));
  const std::string_view part = rest.substr(dot);
  if (!found || (part != ".weight" && part != ".bias")) return std::nullopt;
  const bool shared = rest.substr(0, dot).ends_with("_shexp") && found->find('.') == std::string_view::npos;
  if (shared && !variant.experts().shared) return std::nullopt;
  return concat(layer_prefix(layer), shared ? variant.experts().shared_name() : "", *found, part);
}

}  // namespace moeflux
