// A model as a list of layers: each a mixer and a feed-forward part, with sizes and flavours of its own.
#pragma once

#include <variant>
#include <vector>

#include "models/dense_mlp.h"
#include "models/gated_delta.h"
#include "models/grouped_attention.h"
#include "models/latent_attention.h"
#include "models/routed_experts.h"
#include "models/variant.h"

namespace moeflux {

using Mixer = std::variant<GroupedAttention, LatentAttention, GatedDelta>;
using FeedForward = std::variant<RoutedExperts, DenseMlp>;

struct Layer {
  Mixer mixer;
  FeedForward feed_forward;

  const RoutedExperts* experts() const { return std::get_if<RoutedExperts>(&feed_forward); }
  StatePieces state() const {
    return std::visit([](const auto& each) { return each.state(); }, mixer);
  }

  bool operator==(const Layer&) const = default;
};

std::vector<Layer> layers_of(const Variant& variant);

}  // namespace moeflux
