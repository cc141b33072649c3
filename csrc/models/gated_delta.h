// Gated delta-net: a short convolution and a recurrent state in place of attention.
#pragma once

#include "models/check.h"
#include "models/state_piece.h"
#include "models/tensor_list.h"

namespace moeflux {

struct GatedDelta {
  int64_t key_heads = 0;
  int64_t value_heads = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  int64_t taps = 0;      // of the convolution
  bool sigmoid = false;  // what is read is multiplied by sigmoid(z), in place of silu(z)
  bool tiled = false;    // value heads take turns at the key heads, in place of neighbours sharing one

  int64_t key_width() const { return key_heads * key_dim; }
  int64_t value_width() const { return value_heads * value_dim; }
  int64_t channels() const { return 2 * key_width() + value_width(); }  // of the convolution: q, k and v

  static constexpr std::string_view kind = "gated_delta";
  template <typename Self, typename Visit>
  static void each_field(Self& self, const Visit& visit) {
    visit("key_heads", self.key_heads);
    visit("value_heads", self.value_heads);
    visit("key_dim", self.key_dim);
    visit("value_dim", self.value_dim);
    visit("taps", self.taps);
    visit("sigmoid", self.sigmoid, false);
    visit("tiled", self.tiled, false);
  }
  void check(const Check& check) const;

  void add_tensors(TensorList& list) const;
  StatePieces state() const;

  bool operator==(const GatedDelta&) const = default;
};

}  // namespace moeflux
