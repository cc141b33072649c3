// What a slot cache would have done: recorded routing played against the policies, without memory and without reads.
//
// The order is that of decoding: token after token, layer after layer, the experts of one layer together. It is the
// engine's own order of a step, so that the counts are those the engine would have had: what is there is used first,
// what is missing takes slots in ascending order, and the experts of the last layers are held until their batches are
// over.
#pragma once

#include <cstdint>
#include <span>

#include "core/interruption.h"
#include "io/cache_policy.h"

namespace moeflux {

struct RecordedRouting {
  std::span<const uint16_t> ids;  // [tokens, layers, k], no expert twice in one k, each below `experts`
  int64_t layers = 0;
  int64_t experts = 0;  // of a layer
  int64_t experts_per_token = 0;

  size_t groups() const { return ids.size() / static_cast<size_t>(experts_per_token); }
};

struct ReplayCounts {
  int64_t hits = 0;
  int64_t misses = 0;
};

// `slots`: at least k. `ring_depth`: as EngineOptions. The interruption is asked every few thousand groups.
ReplayCounts replay(const RecordedRouting& routing, CachePolicy policy, int64_t slots, int64_t ring_depth,
                    const Interruption& interruption);

// The fewest misses that any policy could have: what is given up is what is asked for last. The experts of a group are
// there together, so none of them makes room for another.
ReplayCounts replay_optimum(const RecordedRouting& routing, int64_t slots, const Interruption& interruption);

}  // namespace moeflux
