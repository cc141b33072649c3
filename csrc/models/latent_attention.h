// Attention over one latent row and one rotated row per position, which all heads share.
#pragma once

#include <optional>

#include "models/index.h"
#include "models/rope.h"
#include "models/state_piece.h"
#include "models/tensor_list.h"

namespace moeflux {

struct LatentAttention {
  int64_t heads = 0;
  int64_t q_rank = 0;  // 0: queries come from one q_proj
  int64_t kv_rank = 0;
  int64_t nope_dim = 0;  // channels of a head's query and key that do not turn
  int64_t v_dim = 0;
  Rope rope;                        // turns all the other channels
  std::optional<Index> index = {};  // selects the rows that a row attends to; absent: it attends to all

  int64_t head_dim() const { return nope_dim + rope.dim; }
  int64_t q_width() const { return heads * head_dim(); }
  int64_t kv_a_width() const { return kv_rank + rope.dim; }
  int64_t kv_b_head() const { return nope_dim + v_dim; }  // rows of kv_b per head
  int64_t out_width() const { return heads * v_dim; }     // what o_proj takes

  static constexpr std::string_view kind = "latent_attention";
  template <typename Self, typename Visit>
  static void each_field(Self& self, const Visit& visit) {
    visit("heads", self.heads);
    visit("q_rank", self.q_rank, 0);
    visit("kv_rank", self.kv_rank);
    visit("nope_dim", self.nope_dim);
    visit("v_dim", self.v_dim);
    visit("rope", self.rope);
    visit("index", self.index, std::nullopt);
  }
  void check(const Check& check) const;

  void add_tensors(TensorList& list) const;
  StatePieces state() const;

  bool operator==(const LatentAttention&) const = default;
};

}  // namespace moeflux
