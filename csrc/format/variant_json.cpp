#include "format/variant_json.h"

#include <array>
#include <set>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/text.h"

namespace moeflux {
namespace {

// ---- Names of the flavours, in the order of each enum ---------------------------------------------------------------

constexpr std::array<std::string_view, 4> names_of(ModelType) {
  return {"qwen3_5_moe", "qwen3_next", "qwen3_moe", "deepseek_v3"};
}
constexpr std::array<std::string_view, 2> names_of(Attention) { return {"gqa", "mla"}; }
constexpr std::array<std::string_view, 2> names_of(RopeKind) { return {"vanilla", "yarn"}; }
constexpr std::array<std::string_view, 2> names_of(RouterKind) { return {"softmax", "noaux_tc"}; }
constexpr std::array<std::string_view, 3> names_of(SharedExpertKind) { return {"none", "gated", "plain"}; }
constexpr std::array<std::string_view, 2> names_of(LayerKind) { return {"linear", "full"}; }
constexpr std::array<std::string_view, 2> names_of(MlpKind) { return {"dense", "moe"}; }

template <typename T>
concept Flavour = std::is_enum_v<T>;

// ---- One list of the fields, for reading and writing ----------------------------------------------------------------

// Calls visit(name, field) for every field, in the order of the struct.
template <typename V, typename Visit>
void each_field(V& v, const Visit& visit) {
  visit("name", v.name);
  visit("model_type", v.model_type);
  visit("attention", v.attention);
  visit("rope", v.rope);
  visit("router", v.router);
  visit("shared_expert", v.shared_expert);
  visit("attention_gate", v.attention_gate);
  visit("tied_embeddings", v.tied_embeddings);
  visit("layer_kinds", v.layer_kinds);
  visit("mlp_kinds", v.mlp_kinds);
  visit("hidden_size", v.hidden_size);
  visit("vocab_size", v.vocab_size);
  visit("rms_norm_eps", v.rms_norm_eps);
  visit("max_context", v.max_context);
  visit("num_heads", v.num_heads);
  visit("num_kv_heads", v.num_kv_heads);
  visit("head_dim", v.head_dim);
  visit("rotary_dim", v.rotary_dim);
  visit("rope_theta", v.rope_theta);
  visit("linear_key_heads", v.linear_key_heads);
  visit("linear_value_heads", v.linear_value_heads);
  visit("linear_key_dim", v.linear_key_dim);
  visit("linear_value_dim", v.linear_value_dim);
  visit("conv_kernel", v.conv_kernel);
  visit("q_lora_rank", v.q_lora_rank);
  visit("kv_lora_rank", v.kv_lora_rank);
  visit("qk_nope_dim", v.qk_nope_dim);
  visit("qk_rope_dim", v.qk_rope_dim);
  visit("v_head_dim", v.v_head_dim);
  visit("num_experts", v.num_experts);
  visit("experts_per_token", v.experts_per_token);
  visit("moe_intermediate", v.moe_intermediate);
  visit("shared_intermediate", v.shared_intermediate);
  visit("dense_intermediate", v.dense_intermediate);
  visit("normalize_topk", v.normalize_topk);
  visit("num_groups", v.num_groups);
  visit("groups_per_token", v.groups_per_token);
  visit("routed_scaling", v.routed_scaling);
  visit("yarn_factor", v.yarn_factor);
  visit("yarn_original_context", v.yarn_original_context);
  visit("yarn_beta_fast", v.yarn_beta_fast);
  visit("yarn_beta_slow", v.yarn_beta_slow);
  visit("yarn_mscale", v.yarn_mscale);
  visit("yarn_mscale_all_dim", v.yarn_mscale_all_dim);
  visit("eos_ids", v.eos_ids);
  visit("bos_id", v.bos_id);
  visit("think_start_id", v.think_start_id);
  visit("think_end_id", v.think_end_id);
  visit("lossy", v.lossy);
}

// ---- Reading --------------------------------------------------------------------------------------------------------

void read_value(bool& out, const Json& json, const std::string& where) {
  if (!json.boolean()) wrong_value(where, "true or false", &json);
  out = *json.boolean();
}

void read_value(int64_t& out, const Json& json, const std::string& where) {
  if (!json.integer()) wrong_value(where, "a whole number", &json);
  out = *json.integer();
}

void read_value(double& out, const Json& json, const std::string& where) {
  if (json.integer())
    out = static_cast<double>(*json.integer());
  else if (json.real())
    out = *json.real();
  else
    wrong_value(where, "a number", &json);
}

void read_value(std::string& out, const Json& json, const std::string& where) {
  if (!json.string()) wrong_value(where, "a string", &json);
  out = *json.string();
}

template <Flavour T>
void read_value(T& out, const Json& json, const std::string& where) {
  constexpr auto names = names_of(T{});
  std::string known;
  for (size_t i = 0; i < names.size(); ++i) {
    if (json.string() && *json.string() == names[i]) {
      out = static_cast<T>(i);
      return;
    }
    known += concat(i ? " or " : "", names[i]);
  }
  wrong_value(where, known, &json);
}

template <typename T>
void read_value(std::vector<T>& out, const Json& json, const std::string& where) {
  if (!json.array()) wrong_value(where, "an array", &json);
  for (size_t i = 0; i < json.array()->size(); ++i) {
    T item{};
    read_value(item, (*json.array())[i], concat(where, "[", i, "]"));
    out.push_back(std::move(item));
  }
}

// ---- Writing --------------------------------------------------------------------------------------------------------

template <typename T>
Json written(const T& value) {
  return Json(Json::Value(value));
}

template <Flavour T>
Json written(const T& value) {
  return Json(std::string(names_of(value)[static_cast<size_t>(value)]));
}

template <typename T>
Json written(const std::vector<T>& values) {
  Json::Array items;
  for (const T& value : values) items.push_back(written(value));
  return Json(std::move(items));
}

// ---- Rules ----------------------------------------------------------------------------------------------------------

template <typename Found>
void require(const Variant& v, bool holds, std::string_view field, std::string_view expected, const Found& found) {
  if (!holds) throw FormatError(concat(printable(v.name), ": ", field, ": expected ", expected, ", found ", found));
}

struct Limit {
  std::string_view field;
  int64_t value;
  int64_t least;
  int64_t most;
};

void check_limits(const Variant& v, std::initializer_list<Limit> limits) {
  for (const Limit& limit : limits)
    require(v, limit.value >= limit.least && limit.value <= limit.most, limit.field,
            concat(limit.least, " to ", limit.most), limit.value);
}

void check_positive(const Variant& v, std::string_view field, double value) {
  require(v, value > 0, field, "a positive number", value);
}

void check_divides(const Variant& v, std::string_view field, int64_t value, std::string_view divisor_field,
                   int64_t divisor) {
  require(v, value % divisor == 0, field, concat("a multiple of ", divisor_field, " (", divisor, ")"), value);
}

void check_sizes(const Variant& v) {
  // What a flavour does not use may be 0; nothing may be negative or so large that a product overflows.
  check_limits(v, {{"layer_kinds: layers", v.num_layers(), 1, max_layers},
                   {"hidden_size", v.hidden_size, 1, max_width},
                   {"vocab_size", v.vocab_size, 1, max_vocab},
                   {"max_context", v.max_context, 1, max_context_limit},
                   {"num_heads", v.num_heads, 1, max_width},
                   {"num_kv_heads", v.num_kv_heads, 1, max_width},
                   {"head_dim", v.head_dim, 1, max_width},
                   {"rotary_dim", v.rotary_dim, 1, v.head_dim},
                   {"linear_key_heads", v.linear_key_heads, 0, max_width},
                   {"linear_value_heads", v.linear_value_heads, 0, max_width},
                   {"linear_key_dim", v.linear_key_dim, 0, max_width},
                   {"linear_value_dim", v.linear_value_dim, 0, max_width},
                   {"conv_kernel", v.conv_kernel, 0, 16},
                   {"q_lora_rank", v.q_lora_rank, 0, max_width},
                   {"kv_lora_rank", v.kv_lora_rank, 0, max_width},
                   {"qk_nope_dim", v.qk_nope_dim, 0, max_width},
                   {"qk_rope_dim", v.qk_rope_dim, 0, max_width},
                   {"v_head_dim", v.v_head_dim, 0, max_width},
                   {"num_experts", v.num_experts, 1, max_experts},
                   {"experts_per_token", v.experts_per_token, 1, v.num_experts},
                   {"moe_intermediate", v.moe_intermediate, 1, max_width},
                   {"shared_intermediate", v.shared_intermediate, 0, max_width},
                   {"dense_intermediate", v.dense_intermediate, 0, max_width},
                   {"num_groups", v.num_groups, 0, max_experts},
                   {"groups_per_token", v.groups_per_token, 0, max_experts}});
  check_limits(v, {{"num_heads * head_dim (q_proj)", v.q_proj_out(), 1, max_product_width},
                   {"num_kv_heads * head_dim", v.kv_dim(), 1, max_product_width},
                   {"num_heads * v_head_dim (o_proj)", v.o_proj_in(), 1, max_product_width},
                   {"num_heads * (qk_nope_dim + v_head_dim)", v.kv_b_out(), 0, max_product_width},
                   {"linear heads * dims (conv channels)", v.conv_channels(), 0, max_product_width}});
  check_positive(v, "rms_norm_eps", v.rms_norm_eps);
  check_positive(v, "rope_theta", v.rope_theta);
  check_positive(v, "routed_scaling", v.routed_scaling);
  require(v, v.rotary_dim % 2 == 0, "rotary_dim", "an even number", v.rotary_dim);
  require(v, v.hidden_size % 32 == 0, "hidden_size", "a multiple of 32", v.hidden_size);
  require(v, v.moe_intermediate % 32 == 0, "moe_intermediate", "a multiple of 32", v.moe_intermediate);
}

void check_attention(const Variant& v) {
  if (v.attention == Attention::gqa) {
    check_divides(v, "num_heads", v.num_heads, "num_kv_heads", v.num_kv_heads);
  } else {
    check_limits(v, {{"kv_lora_rank", v.kv_lora_rank, 1, max_width},
                     {"qk_nope_dim", v.qk_nope_dim, 1, max_width},
                     {"qk_rope_dim", v.qk_rope_dim, 1, max_width},
                     {"v_head_dim", v.v_head_dim, 1, max_width}});
    require(v, v.head_dim == v.qk_nope_dim + v.qk_rope_dim, "head_dim", "qk_nope_dim + qk_rope_dim", v.head_dim);
    require(v, v.rotary_dim == v.qk_rope_dim, "rotary_dim", concat("qk_rope_dim (", v.qk_rope_dim, ")"), v.rotary_dim);
    require(v, !v.attention_gate, "attention_gate", "false with latent attention", "true");
  }
  for (int64_t layer = 0; layer < v.num_layers(); ++layer) {
    if (v.is_full(layer)) continue;
    require(v, v.attention == Attention::gqa, "layer_kinds", "only full layers with latent attention", "a linear one");
    check_limits(v, {{"linear_key_heads", v.linear_key_heads, 1, max_width},
                     {"linear_value_heads", v.linear_value_heads, 1, max_width},
                     {"linear_key_dim", v.linear_key_dim, 1, max_width},
                     {"linear_value_dim", v.linear_value_dim, 1, max_width},
                     {"conv_kernel", v.conv_kernel, 2, 16}});
    check_divides(v, "linear_value_heads", v.linear_value_heads, "linear_key_heads", v.linear_key_heads);
    break;
  }
  if (v.rope == RopeKind::yarn) {
    check_positive(v, "yarn_factor", v.yarn_factor);
    check_positive(v, "yarn_original_context", static_cast<double>(v.yarn_original_context));
    check_positive(v, "yarn_beta_fast", v.yarn_beta_fast);
    check_positive(v, "yarn_beta_slow", v.yarn_beta_slow);
    require(v, v.yarn_mscale >= 0, "yarn_mscale", "0 or a positive number", v.yarn_mscale);
    require(v, v.yarn_mscale_all_dim >= 0, "yarn_mscale_all_dim", "0 or a positive number", v.yarn_mscale_all_dim);
  }
}

void check_feed_forward(const Variant& v) {
  require(v, v.mlp_kinds.size() == v.layer_kinds.size(), "mlp_kinds", concat(v.num_layers(), " entries, one a layer"),
          v.mlp_kinds.size());
  int64_t moe = 0;
  for (MlpKind kind : v.mlp_kinds) moe += kind == MlpKind::moe;
  require(v, moe > 0, "mlp_kinds", "at least one layer with experts", "none");
  if (v.shared_expert != SharedExpertKind::none)
    check_limits(v, {{"shared_intermediate", v.shared_intermediate, 1, max_width}});
  if (moe < v.num_layers()) check_limits(v, {{"dense_intermediate", v.dense_intermediate, 1, max_width}});
  if (v.router == RouterKind::noaux_tc) {
    check_limits(
        v, {{"num_groups", v.num_groups, 1, v.num_experts}, {"groups_per_token", v.groups_per_token, 1, v.num_groups}});
    require(v, v.num_experts % v.num_groups == 0, "num_groups",
            concat("a divisor of num_experts (", v.num_experts, ")"), v.num_groups);
    const int64_t reach = v.groups_per_token * (v.num_experts / v.num_groups);
    require(v, v.experts_per_token <= reach, "experts_per_token",
            concat("at most the ", reach, " experts of the kept groups"), v.experts_per_token);
  }
}

}  // namespace

Variant parse_variant(std::string_view text, std::string_view where) {
  return variant_from_json(parse_json(text, where), where);
}

Variant variant_from_json(const Json& json, std::string_view where) {
  if (!json.object()) wrong_value(where, "an object", &json);
  std::set<std::string_view> known;
  Variant variant;
  each_field(variant, [&](std::string_view name, auto& field) {
    known.insert(name);
    const Json* value = json.find(name);
    if (!value) throw FormatError(concat(where, ": field ", in_quotes(name), " is missing"));
    read_value(field, *value, concat(where, ".", name));
  });
  for (const JsonMember& member : *json.object())
    if (!known.contains(member.key)) throw FormatError(concat(where, ": unknown field ", in_quotes(member.key)));
  check_variant(variant);
  return variant;
}

Json variant_to_json(const Variant& variant) {
  Json::Object members;
  each_field(variant,
             [&](std::string_view name, const auto& field) { members.push_back({std::string(name), written(field)}); });
  return Json(std::move(members));
}

void check_variant(const Variant& variant) {
  check_sizes(variant);
  check_attention(variant);
  check_feed_forward(variant);
}

}  // namespace moeflux
