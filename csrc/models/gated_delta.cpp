#include "models/gated_delta.h"

namespace moeflux {

void GatedDelta::add_tensors(TensorList& list) const {
  list.matrix("linear_attn.in_proj_qkv", channels(), list.hidden());
  list.matrix("linear_attn.in_proj_z", value_width(), list.hidden());
  list.matrix("linear_attn.in_proj_b", value_heads, list.hidden());
  list.matrix("linear_attn.in_proj_a", value_heads, list.hidden());
  list.matrix("linear_attn.out_proj", list.hidden(), value_width());
  list.conv("linear_attn.conv1d.weight", channels(), taps);
  list.vector("linear_attn.A_log", value_heads);
  list.vector("linear_attn.dt_bias", value_heads);
  list.vector("linear_attn.norm.weight", value_dim);
}

StatePieces GatedDelta::state() const {
  return {{"conv", false, {taps - 1, channels()}}, {"recurrent", false, {value_heads, value_dim, key_dim}}};
}

}  // namespace moeflux
