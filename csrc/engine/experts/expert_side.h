// Computes the experts that routers pick, layer by layer, in one of four ways:
//
// - the resident step: with all experts of the layer in slots for good, one token, or several where the backend groups
//   their choices. The host has no part in it.
// - the overlapped step: one token, on a device that runs ahead of the host. It submits once per layer.
// - the tiered step: the same where the device has memory of its own.
// - the streamed chunk: any number of tokens. Experts in slots are computed while the others are read.
//
// Every output has a row of its own, and the rows are summed in router order. So neither the order of arrival nor the
// number of slots changes a bit.
#pragma once

#include <string>

#include "engine/experts/expert_slots.h"
#include "engine/experts/feed.h"
#include "engine/experts/picks.h"
#include "engine/experts/prefetcher.h"
#include "engine/experts/resident_step.h"

namespace moeflux {

class ExpertSide {
 public:
  // `options` are resolved.
  ExpertSide(const StoreDirectory& store, Backend& backend, const EngineOptions& options, const ReaderFactory& open);

  // Begins a call of n tokens. `finish` or `abandon` ends it.
  void begin(int64_t n);

  // scratch.hidden += experts(norm(scratch.hidden)), after what was recorded before.
  void run(Recorder& recorder, const RoutedExpertsBlock& block, const Scratch& scratch, int64_t n, StepStats& stats);

  // Whether `run` of n tokens would need nothing of the host, in any layer, and so depend on nothing that it knows.
  bool runs_alone(int64_t n);

  // After a submission: waits for the reads that the batch holds for, and releases it. IoError when a read failed.
  void let_go(Recorder& recorder, StepStats& stats) { feed_.let_go(recorder, stats); }

  // Ends a call when nothing is in flight. IoError when experts were read since the last time and the store is not what
  // was opened. Then no expert is kept, because nobody knows which are the old ones.
  void finish(StepStats& stats);
  // The same after a failure elsewhere; throws nothing.
  void abandon() noexcept;

  void observe_routing(RoutingObserver observer) { picks_.observe(std::move(observer)); }
  double read_rate(double seconds) const { return slots_.read_rate(seconds); }

  // The threads that read, and how: for all that a step reads.
  ReadPool& pool() { return slots_.pool(); }
  ReadMode read_mode() const { return slots_.store().mode(); }

  int64_t slots() const { return slots_.count(); }
  int64_t host_slots() const { return slots_.host_count(); }
  int64_t filled_slots() const { return slots_.filled(); }
  int64_t filled_host_slots() const { return slots_.filled_of_host(); }
  int64_t expert_bytes() const { return slots_.store().largest().bytes; }
  int64_t read_buffers() const { return slots_.pool().memory(); }
  // Bytes of the host's memory that a device with memory of its own needs: planned with resolved options, and held.
  static int64_t planned_staging(const StoreDirectory& store, const EngineOptions& options) {
    return ExpertSlots::planned_staging(store, options) + ExpertsOnCpu::planned_bytes(store, options);
  }
  int64_t staging() const { return slots_.staging() + (cpu_ ? cpu_->bytes() : 0); }
  // Bytes of slots and of lists: planned with resolved options, and held. `shared`: whether host and device share
  // memory.
  static int64_t planned_slots(const StoreDirectory& store, const EngineOptions& options, bool shared);
  static int64_t planned_tables(const StoreDirectory& store, const EngineOptions& options);
  int64_t slot_bytes() const { return slots_.bytes(); }
  // The same of slots in the host's memory.
  static int64_t planned_host_slots(const StoreDirectory& store, const EngineOptions& options) {
    return ExpertSlots::planned_host_bytes(store, options);
  }
  int64_t host_slot_bytes() const { return slots_.host_bytes(); }
  int64_t tables() const;
  const std::string& describe() const { return describe_; }  // "32 expert slots, ..., lru, look-ahead auto"

 private:
  // The values when a call of the engine began.
  struct CallStart {
    int64_t tokens = 0;
    Stopwatch time;
    double busy_seconds = 0;  // of the pool
    LoaderCounts loader;
  };

  void check_unchanged();
  void end_call(StepStats& stats);

  Backend& backend_;
  ExpertSlots slots_;
  Prefetcher prefetcher_;
  std::unique_ptr<ExpertsOnCpu> cpu_;  // null: none
  ExpertFeed feed_;
  Picks picks_;
  ResidentStep resident_;
  std::string describe_;
  CallStart call_;
  Stopwatch laps_;
  int64_t confirmed_ = 0;  // how many of the loader's reads were over when the store was last checked
};

}  // namespace moeflux
