// A router, the experts it chooses from, and an expert that every token goes through.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "models/check.h"
#include "models/tensor_list.h"

namespace moeflux {

enum class Scoring {
  softmax,
  noaux_tc,  // sigmoid scores, a bias for choosing only, groups
};

constexpr std::array<std::string_view, 2> names_of(Scoring) { return {"softmax", "noaux_tc"}; }

struct Router {
  Scoring scoring = Scoring::softmax;
  bool normalize = true;    // the weights of the chosen add up to 1, before scaling
  double scaling = 1;       // of the weights
  int64_t groups = 0;       // how many groups the experts are divided into; softmax: 0 is none
  int64_t groups_kept = 0;  // how many of the groups a token keeps
  bool bias = false;        // added to the logits
  bool factors = false;     // of the experts, by which their weights are multiplied at last; softmax only

  template <typename Self, typename Visit>
  static void each_field(Self& self, const Visit& visit) {
    visit("scoring", self.scoring);
    visit("normalize", self.normalize, true);
    visit("scaling", self.scaling, 1.0);
    visit("groups", self.groups, 0);
    visit("groups_kept", self.groups_kept, 0);
    visit("bias", self.bias, false);
    visit("factors", self.factors, false);
  }
  bool operator==(const Router&) const = default;
};

struct SharedExpert {
  int64_t intermediate = 0;
  bool gated = false;  // multiplied by sigmoid(gate . x); otherwise added as it is

  template <typename Self, typename Visit>
  static void each_field(Self& self, const Visit& visit) {
    visit("intermediate", self.intermediate);
    visit("gated", self.gated, false);
  }
  bool operator==(const SharedExpert&) const = default;
};

// How gate and up of an expert meet where it is not silu(gate) * up: with gate at most `limit`, and up between -limit
// and limit, it is gate * sigmoid(alpha * gate) * (up + 1).
struct ClampedSwiglu {
  double alpha = 0;
  double limit = 0;

  template <typename Self, typename Visit>
  static void each_field(Self& self, const Visit& visit) {
    visit("alpha", self.alpha);
    visit("limit", self.limit);
  }
  bool operator==(const ClampedSwiglu&) const = default;
};

struct RoutedExperts {
  int64_t count = 0;  // of experts
  int64_t per_token = 0;
  int64_t intermediate = 0;
  Router router;
  std::optional<SharedExpert> shared;
  bool bias = false;  // gate, up and down of every expert add one
  std::optional<ClampedSwiglu> clamped = {};
  bool geglu = false;  // in place of swiglu, in the shared expert too
  // Router, experts and shared expert each norm by themselves what they read. What the experts yield, what the shared
  // one yields, and their sum are normed. At last, the stream is multiplied by a number of the layer.
  bool framed = false;

  static constexpr std::string_view kind = "routed_experts";
  template <typename Self, typename Visit>
  static void each_field(Self& self, const Visit& visit) {
    visit("count", self.count);
    visit("per_token", self.per_token);
    visit("intermediate", self.intermediate);
    visit("router", self.router);
    visit("shared", self.shared, std::nullopt);
    visit("bias", self.bias, false);
    visit("clamped", self.clamped, std::nullopt);
    visit("geglu", self.geglu, false);
    visit("framed", self.framed, false);
  }
  void check(const Check& check) const;

  void add_tensors(TensorList& list) const;
  std::string shared_name() const;  // what the names of the shared expert's matrices begin with

  bool operator==(const RoutedExperts&) const = default;
};

}  // namespace moeflux
