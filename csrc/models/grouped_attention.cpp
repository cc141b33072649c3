#include "models/grouped_attention.h"

namespace moeflux {

void GroupedAttention::add_tensors(TensorList& list) const {
  list.matrix("self_attn.q_proj", q_width(), list.hidden());
  list.matrix("self_attn.k_proj", kv_width(), list.hidden());
  if (!keys_as_values) list.matrix("self_attn.v_proj", kv_width(), list.hidden());
  list.matrix("self_attn.o_proj", list.hidden(), out_width());
  if (qk_norm) {
    list.vector("self_attn.q_norm.weight", joint_norm ? out_width() : head_dim);
    list.vector("self_attn.k_norm.weight", joint_norm ? kv_width() : head_dim);
  }
  if (bias) {
    list.vector("self_attn.q_proj.bias", q_width());
    list.vector("self_attn.k_proj.bias", kv_width());
    if (!keys_as_values) list.vector("self_attn.v_proj.bias", kv_width());
  }
  if (out_bias) list.vector("self_attn.o_proj.bias", list.hidden());
  if (sinks) list.vector("self_attn.sinks", heads);
  if (!index) return;
  list.matrix("self_attn.indexer.index_qk_proj", (index->heads + 1) * index->dim, list.hidden());
  list.vector("self_attn.indexer.q_layernorm.weight", index->dim);
  list.vector("self_attn.indexer.k_layernorm.weight", index->dim);
}

void GroupedAttention::check(const Check& check) const {
  check.limits(
      {{"heads", heads, 1, max_width}, {"kv_heads", kv_heads, 1, max_width}, {"head_dim", head_dim, 1, max_width}});
  check.limits({{"window", window, 0, max_context_limit}});
  check.limits({{"heads * head_dim (q_proj)", q_width(), 1, max_product_width},
                {"kv_heads * head_dim", kv_width(), 1, max_product_width}});
  check.divides("heads", heads, "kv_heads", kv_heads);
  check.require(!joint_norm || qk_norm, "joint_norm", "false without qk_norm", "true");
  check.require(!joint_norm || !gate, "joint_norm", "false with a gate, which lies between the heads of q", "true");
  check.require(scale >= 0, "scale", "0 or a positive number", scale);
  rope.check(check, head_dim);
  if (!index) return;
  index->check(check, rope.dim);
  check.limits({{"index.unit", index->unit, 2, max_unit}});
  check.require(window == 0, "window", "0 with an index", window);
}

StatePieces GroupedAttention::state() const {
  StatePieces pieces = {{"k", true, {kv_heads, head_dim}, 1, window}, {"v", true, {kv_heads, head_dim}, 1, window}};
  if (!index) return pieces;
  pieces.push_back({"index_k", true, {index->dim}, index->unit});
  pieces.push_back({"index_rows", false, {index->unit - 1, index->dim}});  // of the unit that is not complete
  return pieces;
}

}  // namespace moeflux
