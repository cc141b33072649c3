#include "engine/routing_counts.h"

#include <algorithm>
#include <cstddef>

namespace moeflux {

RoutingCounts::RoutingCounts(const Variant& variant) : experts_(variant.experts().count) {
  for (int64_t layer = 0; layer < variant.num_layers(); ++layer)
    if (variant.is_moe(layer)) layers_.push_back(variant.layers_before + layer);
  counts_.resize(layers_.size() * static_cast<size_t>(experts_));
}

void RoutingCounts::add(int64_t layer, std::span<const int32_t> ids) {
  const auto row = std::ranges::lower_bound(layers_, layer) - layers_.begin();
  const std::lock_guard lock(mutex_);
  for (const int32_t id : ids) ++counts_[static_cast<size_t>(row * experts_ + id)];
}

std::vector<int64_t> RoutingCounts::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

}  // namespace moeflux
