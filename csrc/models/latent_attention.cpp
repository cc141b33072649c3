#include "models/latent_attention.h"

namespace moeflux {

void LatentAttention::add_tensors(TensorList& list) const {
  if (q_rank > 0) {
    list.matrix("self_attn.q_a_proj", q_rank, list.hidden());
    list.vector("self_attn.q_a_layernorm.weight", q_rank);
    list.matrix("self_attn.q_b_proj", q_width(), q_rank);
  } else {
    list.matrix("self_attn.q_proj", q_width(), list.hidden());
  }
  list.matrix("self_attn.kv_a_proj_with_mqa", kv_a_width(), list.hidden());
  list.vector("self_attn.kv_a_layernorm.weight", kv_rank);
  if (list.has("self_attn.embed_q.weight") || list.has("self_attn.unembed_out.weight")) {
    list.stack("self_attn.embed_q", heads, kv_rank, nope_dim);
    list.stack("self_attn.unembed_out", heads, v_dim, kv_rank);
  } else {
    list.matrix("self_attn.kv_b_proj", heads * kv_b_head(), kv_rank);
  }
  list.matrix("self_attn.o_proj", list.hidden(), out_width());
  if (!index) return;
  list.matrix("self_attn.indexer.wq_b", index->heads * index->dim, q_rank);
  list.matrix("self_attn.indexer.wk", index->dim, list.hidden());
  list.vector("self_attn.indexer.k_norm.weight", index->dim);
  list.vector("self_attn.indexer.k_norm.bias", index->dim);
  list.matrix("self_attn.indexer.weights_proj", index->heads, list.hidden());
}

void LatentAttention::check(const Check& check) const {
  check.limits({{"heads", heads, 1, max_width},
                {"q_rank", q_rank, 0, max_width},
                {"kv_rank", kv_rank, 1, max_width},
                {"nope_dim", nope_dim, 1, max_width},
                {"v_dim", v_dim, 1, max_width}});
  rope.check(check, max_width);
  check.limits({{"heads * (nope_dim + rope.dim) (q_proj)", q_width(), 1, max_product_width},
                {"heads * v_dim (o_proj)", out_width(), 1, max_product_width},
                {"heads * (nope_dim + v_dim)", heads * kv_b_head(), 1, max_product_width},
                {"heads * kv_rank", heads * kv_rank, 1, max_product_width}});
  if (!index) return;
  index->check(check, rope.dim);
  check.require(q_rank > 0, "q_rank", "above 0 with an index, whose queries are made of the compressed ones", q_rank);
  check.require(index->unit == 1, "index.unit", "1", index->unit);
}

StatePieces LatentAttention::state() const {
  StatePieces pieces = {{"latent", true, {kv_rank}}, {"rope_k", true, {rope.dim}}};
  if (index) pieces.push_back({"index_k", true, {index->dim}});
  return pieces;
}

}  // namespace moeflux
