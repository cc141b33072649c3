// A router, the experts it chooses from, and an expert that every token goes through.
#pragma once

#include <optional>

#include "models/tensor_list.h"

namespace moeflux {

enum class Scoring {
  softmax,
  noaux_tc,  // sigmoid scores, a bias for choosing only, groups
};

struct Router {
  Scoring scoring = Scoring::softmax;
  bool normalize = true;    // the weights of the chosen add up to 1, before scaling
  double scaling = 1;       // of the weights
  int64_t groups = 0;       // noaux_tc: experts stand in so many groups
  int64_t groups_kept = 0;  // noaux_tc: of which a token keeps so many

  bool operator==(const Router&) const = default;
};

struct SharedExpert {
  int64_t intermediate = 0;
  bool gated = false;  // multiplied by sigmoid(gate . x); otherwise added as it is

  bool operator==(const SharedExpert&) const = default;
};

struct RoutedExperts {
  int64_t experts = 0;
  int64_t per_token = 0;
  int64_t intermediate = 0;
  Router router;
  std::optional<SharedExpert> shared;

  void add_tensors(TensorList& list) const;

  bool operator==(const RoutedExperts&) const = default;
};

}  // namespace moeflux
