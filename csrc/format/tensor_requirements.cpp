#include "format/tensor_requirements.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <variant>

#include "core/error.h"
#include "models/variant.h"

namespace moeflux {
std::vector<TensorRequirement> tensor_requirements(const Variant& variant, const TensorList::Has& has) {
  const int64_t hidden = variant.hidden_size;
  TensorList list(hidden, has);
  list.matrix("model.embed_tokens", variant.vocab_size, hidden);
  for (int64_t i = 0; i < variant.all_layers(); ++i) {
    const Layer& layer = variant.layer(i);
    list.at(layer_prefix(i));
    if (variant.streams) {
      variant.streams->add_tensors(list, "attn_hyper_connection", true);
      variant.streams->add_tensors(list, "mlp_hyper_connection", true);
    } else {
      list.vector("input_layernorm.weight", hidden);
      list.vector("post_attention_layernorm.weight", hidden);
    }
    if (layer.ngram) layer.ngram->add_tensors(list, variant.stream_count());
    std::visit([&](const auto& mixer) { mixer.add_tensors(list); }, layer.mixer);
    std::visit([&](const auto& feed_forward) { feed_forward.add_tensors(list); }, layer.feed_forward);
  }
  if (variant.draft) {
    for (const char* norm : {"enorm.weight", "hnorm.weight", "shared_head.norm.weight"}) list.vector(norm, hidden);
    for (const char* half : {"e_proj", "h_proj"}) list.matrix(half, hidden, hidden);
  }
  list.at("");
  if (variant.streams)
    variant.streams->add_tensors(list, "model.hyper_connection_mixer", false);
  else
    list.vector("model.norm.weight", hidden);
  if (!variant.tied_embeddings) list.matrix("lm_head", variant.vocab_size, hidden);
  return list.take();
}

// gpt_oss and gemma4 have their own names for a router and for stacked experts.
static std::string in_the_words_of_most(const std::string& name) {
  constexpr std::array<std::array<std::string_view, 2>, 6> words = {
      {{".mlp.router.", ".mlp.gate."},
       {".mlp.experts.gate_proj.", ".mlp.switch_mlp.gate_proj."},
       {".mlp.experts.up_proj.", ".mlp.switch_mlp.up_proj."},
       {".mlp.experts.down_proj.", ".mlp.switch_mlp.down_proj."},
       {".router.proj.", ".mlp.gate."},
       {".experts.switch_glu.", ".mlp.switch_mlp."}}};
  for (const auto& [own, usual] : words)
    if (const size_t at = name.find(own); at != std::string::npos)
      return concat(name.substr(0, at), usual, name.substr(at + own.size()));
  return name;
}

std::string canonical_name(std::string_view stored) {
  constexpr std::string_view first = "language_model.";
  constexpr std::string_view second = "model.language_model.";
  std::string name(stored);
  if (stored.starts_with(first)) name = stored.substr(first.size());
  if (stored.starts_with(second)) name = concat("model.", stored.substr(second.size()));
  constexpr std::string_view block = ".block_sparse_moe.";
  constexpr std::string_view correction = "e_score_correction_bias";
  const size_t at = name.find(block);
  if (at == std::string::npos) return in_the_words_of_most(name);
  const std::string part = name.substr(at + block.size());
  return concat(name.substr(0, at), part == correction ? ".mlp.gate." : ".mlp.", part);
}

bool is_unused_tensor(const Variant& variant, std::string_view canonical) {
  const std::string_view part = canonical.starts_with("model.") ? canonical.substr(6) : canonical;
  for (std::string_view start :
       {"vision_tower.", "visual.", "embed_vision.", "mm_projector.", "multi_modal_projector.", "mtp."})
    if (part.starts_with(start)) return true;
  if (canonical.ends_with(".rotary_emb.inv_freq")) return true;
  if (variant.tied_embeddings && canonical.starts_with("lm_head.")) return true;
  // Some number their multi-token prediction layers after the others.
  const std::initializer_list<ModelType> ones = {ModelType::deepseek_v3, ModelType::deepseek_v32, ModelType::glm4_moe,
                                                 ModelType::minimax_m2, ModelType::glm_moe_dsa};
  const bool numbered = std::ranges::find(ones, variant.model_type) != ones.end();
  return numbered && layer_of(canonical) >= variant.all_layers();
}

std::string layer_prefix(int64_t layer) { return concat("model.layers.", layer, "."); }

int64_t layer_of(std::string_view name) {
  constexpr std::string_view prefix = "model.layers.";
  constexpr size_t max_digits = 9;
  if (!name.starts_with(prefix)) return -1;
  const std::string_view rest = name.substr(prefix.size());
  const size_t digits = rest.find('.');
  if (digits == 0 || digits == std::string_view::npos || digits > max_digits) return -1;
  int64_t layer = 0;
  for (char c : rest.substr(0, digits)) {
    if (c < '0' || c > '9') return -1;
    layer = layer * 10 + (c - '0');
  }
  return layer;
}

}  // namespace moeflux
