#include "models/routed_experts.h"

namespace moeflux {

void RoutedExperts::check(const Check& check) const {
  check.limits({{"count", count, 1, max_experts},
                {"per_token", per_token, 1, count},
                {"intermediate", intermediate, 1, max_width}});
  check.whole_groups("intermediate", intermediate);
  check.positive("router.scaling", router.scaling);
  if (clamped) {
    check.positive("clamped.alpha", clamped->alpha);
    check.positive("clamped.limit", clamped->limit);
  }
  check.require(!geglu || !clamped, "geglu", "false with clamped", "true");
  check.require(!router.factors || router.scoring == Scoring::softmax, "router.factors", "false without softmax",
                "true");
  check.require(!framed || (shared && !shared->gated), "framed", "false without a shared expert that has no gate",
                "true");
  if (shared) check.limits({{"shared.intermediate", shared->intermediate, 1, max_width}});
  if (router.scoring == Scoring::softmax && router.groups == 0) {
    check.limits({{"router.groups_kept", router.groups_kept, 0, 0}});
    return;
  }
  check.limits(
      {{"router.groups", router.groups, 1, count}, {"router.groups_kept", router.groups_kept, 1, router.groups}});
  check.require(count % router.groups == 0, "router.groups", concat("a divisor of count (", count, ")"), router.groups);
  const int64_t reach = router.groups_kept * (count / router.groups);
  check.require(per_token <= reach, "per_token", concat("at most the ", reach, " experts of the kept groups"),
                per_token);
}

std::string RoutedExperts::shared_name() const {
  if (framed) return "mlp.";
  return shared->gated ? "mlp.shared_expert." : "mlp.shared_experts.";
}

void RoutedExperts::add_tensors(TensorList& list) const {
  list.matrix("mlp.gate", count, list.hidden());
  if (router.scoring == Scoring::noaux_tc) list.vector("mlp.gate.e_score_correction_bias", count);
  if (router.bias) list.vector("mlp.gate.bias", count);
  if (router.factors) list.vector("router.per_expert_scale", count);
  if (framed) {
    list.vector("router.scale", list.hidden());
    for (const std::string_view name :
         {"pre_feedforward_layernorm", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_1",
          "post_feedforward_layernorm_2", "post_feedforward_layernorm"})
      list.vector(concat(name, ".weight"), list.hidden());
    list.vector("layer_scalar", 1);
  }
  if (bias) {
    list.vectors("mlp.switch_mlp.gate_proj.bias", count, intermediate);
    list.vectors("mlp.switch_mlp.up_proj.bias", count, intermediate);
    list.vectors("mlp.switch_mlp.down_proj.bias", count, list.hidden());
  }
  if (!shared) return;
  if (shared->gated) list.matrix("mlp.shared_expert_gate", 1, list.hidden());
  list.gated_mlp(shared_name(), shared->intermediate);
}

}  // namespace moeflux
