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

void GatedDelta::check(const Check& check) const {
  check.limits({{"key_heads", key_heads, 1, max_width},
                {"value_heads", value_heads, 1, max_width},
                {"key_dim", key_dim, 1, max_width},
                {"value_dim", value_dim, 1, max_width},
                {"taps", taps, 2, 16}});
  check.limits({{"heads * dims (conv channels)", channels(), 1, max_product_width}});
  check.divides("value_heads", value_heads, "key_heads", key_heads);
}

StatePieces GatedDelta::state() const {
  return {{"conv", false, {taps - 1, channels()}},
          {.name = "recurrent", .shape = {value_heads, value_dim, key_dim}, .is_delta = true}};
}

}  // namespace moeflux
