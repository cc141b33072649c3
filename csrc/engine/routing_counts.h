// Counts what an engine's RoutingObserver is told: how often the router of each layer picked each expert. Several
// threads may use it.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "models/variant.h"

namespace moeflux {

class RoutingCounts {
 public:
  explicit RoutingCounts(const Variant& variant);

  // Like a RoutingObserver, takes ids [tokens, k].
  void add(int64_t layer, std::span<const int32_t> ids);

  const std::vector<int64_t>& layers() const { return layers_; }  // the layers of the model that have experts
  int64_t experts() const { return experts_; }                    // of a layer
  std::vector<int64_t> counts() const;                            // [layers, experts]

 private:
  std::vector<int64_t> layers_;
  int64_t experts_;

  mutable std::mutex mutex_;
  std::vector<int64_t> counts_;
};

}  // namespace moeflux
