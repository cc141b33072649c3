// The second half of a layer: norm, router, and either the experts it picks or one dense MLP.
//
// Experts that are in a slot are computed at once, with the shared expert, while those that are not are being read;
// each of these is computed as it arrives. When the slots are fewer than the experts needed, what has arrived goes on
// its way a few experts at a time, and the slots of those that are computed are filled again while the next compute.
// In a step, a layer whose experts are all in slots for good does without the host: the device looks up what its router
// picked, and nothing is submitted or waited for. Where every expert has a slot and the device could do so, the experts
// that nobody has asked for are read behind the others.
//
// On a device that runs ahead of the host a step submits once a layer. The host waits for the router's choice only,
// while the shared expert computes; experts that are on their way are recorded at once, behind a hold, and with them
// the next layer up to its router's choice: the device goes on by itself when they have arrived.
//
// Outputs land each in its own row and are summed in router order, so neither the order of arrival nor the number of
// slots changes a bit.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "engine/blocks/routed_experts.h"
#include "engine/deferred_ring.h"
#include "engine/expert_groups.h"
#include "engine/prefetcher.h"
#include "engine/scratch.h"
#include "format/store_directory.h"
#include "io/expert_loader.h"
#include "io/expert_store.h"
#include "io/read_pool.h"
#include "io/slot_cache.h"
#include "moeflux.h"

namespace moeflux {

class ExpertSide {
 public:
  // `options` are settled; `chunk`: the most tokens of a call.
  ExpertSide(const StoreDirectory& store, Backend& backend, const EngineOptions& options, int64_t chunk,
             const ReaderFactory& open);

  // A call of n tokens begins; `finish` or `abandon` ends it.
  void begin(int64_t n);

  // scratch.hidden += experts(norm(scratch.hidden)). `commands` hold what was recorded before; they are submitted on
  // the way and new ones stand in their place. The last batch is in flight when this returns.
  void run(std::unique_ptr<Commands>& commands, const RoutedExpertsBlock& block, const Scratch& scratch, int64_t n,
           StepStats& stats);

  // After the submission of `commands`: waits for the reads that these hold for, and lets them go on. IoError when one
  // failed.
  void let_go(StepStats& stats);

  // Waits for everything in flight; throws the first error. IoError also when experts were read since the last time
  // and the store is not what was opened: then no expert is kept, for nobody knows which are the old ones.
  void finish(StepStats& stats);
  // The same after a failure elsewhere: waits, and throws nothing.
  void abandon() noexcept;

  void observe_routing(RoutingObserver observer) { observer_ = std::move(observer); }

  // Bytes a second of a pool like this one, with nothing to do but read random experts; for about so long.
  double read_rate(double seconds) const;

  int64_t slots() const { return cache_.shape().slots; }
  int64_t slot_bytes() const { return memory_->bytes(); }
  int64_t expert_bytes() const { return store_.experts().bytes; }
  int64_t read_buffers() const { return pool_.memory(); }
  // Bytes of lists: what they will be with settled options, and what they are.
  static int64_t slot_memory(const StoreDirectory& store, const EngineOptions& options);
  static int64_t table_bytes(const StoreDirectory& store, const EngineOptions& options);
  int64_t tables() const;
  int readers() const { return pool_.threads(); }
  const std::string& describe() const {
    return describe_;
  }  // "32 expert slots, 4 readers, direct reads, lru, look-ahead auto"

 private:
  // Experts of the layer that are on their way into slots.
  struct Arriving {
    std::vector<ExpertGroups::Group> groups;
    std::vector<Lease> leases;  // of the same experts
  };

  // What a call of the engine is measured from.
  struct CallStart {
    int64_t tokens = 0;
    std::chrono::steady_clock::time_point time;
    double busy_seconds = 0;    // of the pool
    int64_t dropped_bytes = 0;  // of the loader
    int64_t waits = 0;          // of the ring
  };

  bool is_resident(int64_t layer);
  void run_resident(Commands& commands, const RoutedExpertsBlock& block, const Scratch& scratch);
  View slots_of(int64_t layer) const;
  void await_choice(std::unique_ptr<Commands>& commands, const RoutedExpertsBlock& block, bool ahead, StepStats& stats);
  void record_held(Commands& commands, const RoutedExpertsBlock& block, const Scratch& scratch, StepStats& stats);
  void fill_slots(StepStats& stats);
  void sort_out(int64_t layer, StepStats& stats);
  bool more_to_read() const { return next_missing_ < missing_.size(); }
  void read_missing(int64_t layer, StepStats& stats);
  void await_slots(int64_t layer, StepStats& stats);
  void make_room(std::unique_ptr<Commands>& commands, int64_t layer, StepStats& stats);
  void take_arrived(StepStats& stats);
  void end_call(StepStats& stats);
  double lap();
  void record_jobs(Commands& commands, const RoutedExpertsBlock& block, const Scratch& scratch, int64_t n);
  void submit(std::unique_ptr<Commands>& commands, StepStats& stats);
  ExpertMatrices matrices(int64_t slot) const;

  Backend& backend_;
  ExpertStore store_;
  std::unique_ptr<Buffer> memory_;  // of the slots; behind them, where there is one for every expert, a table of u64
                                    // [layer, expert]: the first byte of its slot
  SlotCache cache_;
  ReadPool pool_;
  ExpertLoader loader_;
  ExpertGroups groups_;
  int64_t checksums_;  // bytes
  Prefetcher prefetcher_;
  std::string describe_;
  RoutingObserver observer_;
  bool stays_;                    // an expert, once in its slot
  std::vector<int64_t> settled_;  // [layer]: experts 0 ... are in slots, and those in the table
  int64_t evictions_ = 0;         // that were known when the table was filled

  // Of the layer under way.
  std::vector<ExpertGroups::Group> missing_;
  size_t next_missing_ = 0;
  std::vector<ExpertJob> jobs_;  // to be recorded next
  std::vector<Lease> leases_;    // of every job since the last submission
  int64_t held_ = 0;             // what the commands hold for; 0: nothing
  int64_t confirmed_ = 0;        // of the loader's reads: over when the store was last looked at
  CallStart call_;
  std::chrono::steady_clock::time_point lap_;  // began then
  Arriving arriving_;
  DeferredRing ring_;  // last: drained first, while slots and pool are there
};

}  // namespace moeflux
