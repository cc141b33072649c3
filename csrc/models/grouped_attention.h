// Attention in which groups of query heads share a key and a value head; each q and k head may be normed, or all of
// them as one.
#pragma once

#include <optional>

#include "models/index.h"
#include "models/rope.h"
#include "models/state_piece.h"
#include "models/tensor_list.h"

namespace moeflux {

struct GroupedAttention {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  Rope rope;
  bool gate = false;            // q_proj yields [query | gate] per head; the output is multiplied by the gate's sigmoid
  bool qk_norm = true;          // each q and k head is normed by itself
  bool joint_norm = false;      // not so: all q heads are normed as one row, and all k heads as another
  bool bias = false;            // q_proj, k_proj and v_proj add a bias
  bool out_bias = false;        // o_proj does
  bool sinks = false;           // each head has a score besides, without a value
  int64_t window = 0;           // rows that a row attends to at most, its own among them; 0: all
  double scale = 0;             // of the scores; 0: 1 / sqrt(head_dim)
  bool keys_as_values = false;  // a value is its key before norm and rope; there is no v_proj
  bool value_norm = false;      // each value head is normed by itself, without a weight
  bool out_norm = false;        // what o_proj yields is normed before it is added
  std::optional<Index> index = {};  // selects the rows that a row attends to; absent: it attends to all

  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t q_head() const { return head_dim * (gate ? 2 : 1); }  // numbers that q_proj yields per head
  int64_t q_width() const { return heads * q_head(); }
  int64_t out_width() const { return heads * head_dim; }  // what o_proj takes

  static constexpr std::string_view kind = "grouped_attention";
  template <typename Self, typename Visit>
  static void each_field(Self& self, const Visit& visit) {
    visit("heads", self.heads);
    visit("kv_heads", self.kv_heads);
    visit("head_dim", self.head_dim);
    visit("rope", self.rope);
    visit("gate", self.gate, false);
    visit("qk_norm", self.qk_norm, true);
    visit("joint_norm", self.joint_norm, false);
    visit("bias", self.bias, false);
    visit("out_bias", self.out_bias, false);
    visit("sinks", self.sinks, false);
    visit("window", self.window, int64_t{0});
    visit("scale", self.scale, 0.0);
    visit("keys_as_values", self.keys_as_values, false);
    visit("value_norm", self.value_norm, false);
    visit("out_norm", self.out_norm, false);
    visit("index", self.index, std::nullopt);
  }
  void check(const Check& check) const;

  void add_tensors(TensorList& list) const;
  StatePieces state() const;

  bool operator==(const GroupedAttention&) const = default;
};

}  // namespace moeflux
