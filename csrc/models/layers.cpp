#include "models/layers.h"

namespace moeflux {
namespace {

Rope rope_of(const Variant& v, int64_t dim) {
  Rope rope = {dim, v.rope_theta, {}};
  if (v.rope == RopeKind::yarn)
    rope.yarn = Yarn{v.yarn_factor,    v.yarn_original_context, v.yarn_beta_fast,
                     v.yarn_beta_slow, v.yarn_mscale,           v.yarn_mscale_all_dim};
  return rope;
}

Mixer mixer_of(const Variant& v, int64_t layer) {
  if (!v.is_full(layer))
    return GatedDelta{v.linear_key_heads, v.linear_value_heads, v.linear_key_dim, v.linear_value_dim, v.conv_kernel};
  if (v.attention == Attention::mla)
    return LatentAttention{v.num_heads,   v.q_lora_rank, v.kv_lora_rank,
                           v.qk_nope_dim, v.v_head_dim,  rope_of(v, v.qk_rope_dim)};
  return GroupedAttention{v.num_heads, v.num_kv_heads, v.head_dim, rope_of(v, v.rotary_dim), v.attention_gate};
}

FeedForward feed_forward_of(const Variant& v, int64_t layer) {
  if (!v.is_moe(layer)) return DenseMlp{v.dense_intermediate};
  RoutedExperts experts = {v.num_experts, v.experts_per_token, v.moe_intermediate, {}, {}};
  experts.router = {v.router == RouterKind::softmax ? Scoring::softmax : Scoring::noaux_tc, v.normalize_topk,
                    v.routed_scaling, v.num_groups, v.groups_per_token};
  if (v.shared_expert != SharedExpertKind::none)
    experts.shared = SharedExpert{v.shared_intermediate, v.shared_expert == SharedExpertKind::gated};
  return experts;
}

}  // namespace

std::vector<Layer> layers_of(const Variant& variant) {
  std::vector<Layer> layers;
  for (int64_t layer = 0; layer < variant.num_layers(); ++layer)
    layers.push_back({mixer_of(variant, layer), feed_forward_of(variant, layer)});
  return layers;
}

}  // namespace moeflux
