#include "models/routed_experts.h"

namespace moeflux {

void RoutedExperts::add_tensors(TensorList& list) const {
  list.matrix("mlp.gate", experts, list.hidden());
  if (router.scoring == Scoring::noaux_tc) list.vector("mlp.gate.e_score_correction_bias", experts);
  if (!shared) return;
  if (shared->gated) list.matrix("mlp.shared_expert_gate", 1, list.hidden());
  list.gated_mlp(shared->gated ? "mlp.shared_expert." : "mlp.shared_experts.", shared->intermediate);
}

}  // namespace moeflux
