// ExpertSide as an engine would have it that knows no streaming: every expert is read when the model is opened and lies
// at a place of its own. No slots, leases, tickets, look-ahead. bench/peers/unstreamed/unstreamed.py links the engine
// with it, to see what streaming costs a model that is all in memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "engine/blocks/routed_experts.h"
#include "engine/experts/expert_groups.h"
#include "engine/recorder.h"
#include "format/store_directory.h"
#include "io/expert_store.h"
#include "moeflux.h"

namespace moeflux {

class ExpertSide {
 public:
  ExpertSide(const StoreDirectory& store, Backend& backend, const EngineOptions& options, const ReaderFactory& open);

  void begin(int64_t) {}
  void run(Recorder& recorder, const RoutedExpertsBlock& block, const Scratch& scratch, int64_t n, StepStats& stats);
  void let_go(Recorder&, StepStats&) {}
  void finish(StepStats&) {}
  void abandon() noexcept {}
  void observe_routing(const RoutingObserver&) {}
  double read_rate(double) const { return 0; }

  int64_t slots() const { return layers_ * experts_; }
  int64_t slot_bytes() const { return memory_->bytes(); }
  int64_t expert_bytes() const { return store_.experts().bytes; }
  int64_t read_buffers() const { return 0; }
  static int64_t planned_slots(const StoreDirectory& store, const EngineOptions& options);
  static int64_t planned_staging(const StoreDirectory&, const EngineOptions&) { return 0; }
  int64_t staging() const { return 0; }
  static int64_t planned_tables(const StoreDirectory&, const EngineOptions&) { return 0; }
  int64_t tables() const { return 0; }
  std::string describe() const { return "every expert in memory, no streaming"; }

 private:
  void read_all(int64_t readers);
  View place_of(int64_t layer, int64_t expert) const;

  ExpertStore store_;
  int64_t layers_;
  int64_t experts_;                 // a layer
  std::unique_ptr<Buffer> memory_;  // the experts, then u64 [layer, expert]: the first byte of each
  ExpertGroups groups_;
  std::vector<ExpertJob> jobs_;
};

}  // namespace moeflux
