// What the router of a layer picked, once the host has it.
#pragma once

#include <cstdint>
#include <span>

#include "engine/experts/expert_call.h"
#include "engine/experts/expert_groups.h"
#include "engine/experts/feed.h"
#include "moeflux.h"

namespace moeflux {

class Picks {
 public:
  explicit Picks(const ExpertGroups::Shape& shape) : groups_(shape) {}
  static int64_t planned_tables(const ExpertGroups::Shape& shape) { return ExpertGroups::planned_tables(shape); }
  int64_t tables() const { return groups_.tables(); }

  void observe(RoutingObserver observer) { observer_ = std::move(observer); }
  bool observed() const { return static_cast<bool>(observer_); }

  // Submits what was recorded, and returns when the router has spoken. The result is valid until the next call. With
  // `runs_on`, what was recorded after the mark may still run then.
  std::span<const ExpertGroups::Group> await(const ExpertCall& call, ExpertFeed& feed, bool runs_on);

 private:
  ExpertGroups groups_;
  RoutingObserver observer_;
};

}  // namespace moeflux
