// A model as data: a list of layers, each a mixer and a feed-forward part with sizes and flavours of its own. The twin
// of moeflux.models.variants.Variant, field for field. A Variant that comes from format/variant_json.h obeys every rule
// of `check_variant`.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "models/dense_mlp.h"
#include "models/gated_delta.h"
#include "models/grouped_attention.h"
#include "models/latent_attention.h"
#include "models/ngram_embedding.h"
#include "models/residual_streams.h"
#include "models/routed_experts.h"

namespace moeflux {

enum class ModelType {
  qwen3_5_moe,
  qwen3_next,
  qwen3_moe,
  deepseek_v3,
  glm4_moe,
  minimax_m2,
  qwen2_moe,
  mixtral,
  olmoe,
  deepseek_v2,
  gpt_oss,
  gemma4,
  deepseek_v32,
  qwen4_exp,
  glm_moe_dsa,
};

constexpr std::array<std::string_view, 15> names_of(ModelType) {
  return {"qwen3_5_moe", "qwen3_next", "qwen3_moe",    "deepseek_v3", "glm4_moe",
          "minimax_m2",  "qwen2_moe",  "mixtral",      "olmoe",       "deepseek_v2",
          "gpt_oss",     "gemma4",     "deepseek_v32", "qwen4_exp",   "glm_moe_dsa"};
}

using Mixer = std::variant<GroupedAttention, LatentAttention, GatedDelta>;
using FeedForward = std::variant<RoutedExperts, DenseMlp>;

struct Layer {
  Mixer mixer;
  FeedForward feed_forward;
  std::optional<NgramEmbedding> ngram = {};  // enters the residual streams before the mixer reads them

  // Null where the layer is a dense one.
  const RoutedExperts* experts() const { return std::get_if<RoutedExperts>(&feed_forward); }
  bool operator==(const Layer&) const = default;
};

struct Variant {
  std::string name;
  ModelType model_type = ModelType::qwen3_5_moe;
  std::vector<Layer> layers;
  std::optional<Layer> draft = {};  // numbered behind them: it guesses the token after the next

  int64_t hidden_size = 0;
  int64_t vocab_size = 0;
  double rms_norm_eps = 0;
  int64_t max_context = 0;
  bool tied_embeddings = false;
  double embedding_scale = 1;                   // by which a row of the embedding begins the stream
  double logit_cap = 0;                         // logits are cap * tanh(logits / cap); 0: as they are
  std::optional<ResidualStreams> streams = {};  // without them the residual stream is one, and norms read it

  std::vector<int64_t> eos_ids;
  int64_t bos_id = -1;
  int64_t think_start_id = -1;
  int64_t think_end_id = -1;

  std::vector<std::string> lossy;

  // Where `layers` are some of a model's, which it is cut into for several engines: how many come before and behind.
  // The twin has all of them.
  int64_t layers_before = 0;
  int64_t layers_behind = 0;

  // Whether the embedding is a part of it; otherwise it goes on from the hidden rows of the layer before.
  bool begins() const { return layers_before == 0; }
  // Whether the logits are a part of it; otherwise it yields the hidden rows of its last layer.
  bool ends() const { return layers_behind == 0; }
  bool is_whole() const { return begins() && ends(); }
  std::string layers_named() const;  // "layers 2 to 3 of 4"
  // Numbers of one hidden row: those of all residual streams.
  int64_t row_width() const { return stream_count() * hidden_size; }

  int64_t num_layers() const { return static_cast<int64_t>(layers.size()); }
  // With the layer that drafts.
  int64_t all_layers() const { return num_layers() + (draft ? 1 : 0); }
  const Layer& layer(int64_t index) const {
    return index == num_layers() ? *draft : layers[static_cast<size_t>(index)];
  }
  bool is_moe(int64_t index) const { return layer(index).experts() != nullptr; }
  // The experts of the first layer that has any. Their number, their width and how many a token takes are the same in
  // all such layers, because a slot holds any of them. A part of a model may have none: then they are no experts.
  const RoutedExperts& experts() const;
  int64_t moe_layers() const;  // how many, with the one that drafts
  int64_t stream_count() const { return streams ? streams->count : 1; }
  // What a layer remembers of a session.
  StatePieces state(int64_t index) const;

  bool operator==(const Variant&) const = default;
};

// A model of nothing but the layer that drafts, for its state; no layers without it.
Variant draft_variant(const Variant& variant);

// Whether rows are read from tables of n-gram embeddings.
bool has_tables(const Variant& variant);

// FormatError naming the layer and the field that break a rule.
void check_variant(const Variant& variant);

}  // namespace moeflux
