// Whoever records ops holds a recorder. It has the batch at hand, and is the one place that knows what is in flight:
// batches that were submitted and not waited for, the leases on the experts that they read, and the hold of the batch
// at hand.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "engine/deferred_ring.h"
#include "io/slot_cache.h"
#include "moeflux.h"

namespace moeflux {

class Recorder {
 public:
  // `ring_depth`: how many batches may be in flight; `leases`: how many one of them may have.
  Recorder(Backend& backend, int ring_depth, int64_t leases);
  // Bytes of its lists: planned, and held.
  static int64_t planned_tables(int ring_depth, int64_t leases);
  int64_t tables() const;

  // Begins a call. `stats` counts its submissions and waits. `finish` or `abandon` ends it, and both arguments are used
  // until then.
  void begin(StepStats& stats, const Interruption& interruption);
  // Waits for everything that was deferred, and throws the first error.
  void drain() { ring_.drain(); }
  // The same at the end of a call.
  void finish();
  // The same after a failure elsewhere: drops what was not submitted, waits, and throws nothing.
  void abandon() noexcept;
  // To be called between the pieces of long work. Throws when the call is given up.
  void look_around() const {
    if (!ahead_ && *interruption_) (*interruption_)();
  }

  Commands& current();
  // Keeps the slot until the batch at hand is done.
  void keep(Lease lease) { leases_.push_back(std::move(lease)); }
  bool keeps_any() const { return !leases_.empty(); }

  // Makes what is recorded from here on wait until `release`.
  void hold() { held_ = current().hold(); }
  bool holds() const { return held_ != 0; }
  void release() noexcept { backend_.release(std::exchange(held_, 0)); }

  // The batch at hand is complete, and a new one begins with the next op. It stays in flight with its leases; if there
  // are too many, the oldest one is waited for.
  void send();
  // The same in steps. The ticket goes to one of these:
  Ticket submit();
  void defer(Ticket ticket);
  void await(Ticket ticket);  // it is waited for, and its leases are given back

  // Records a batch, or several by `send`, none of which is submitted. Settled, they come to `batches`, also before an
  // error.
  template <typename Record>
  void record_ahead(std::vector<std::unique_ptr<Commands>>& batches, const Record& record) {
    ahead_ = &batches;
    try {
      record();
      send();
    } catch (...) {
      commands_.reset();
      ahead_ = nullptr;
      throw;
    }
    ahead_ = nullptr;
  }
  bool is_ahead() const { return ahead_ != nullptr; }
  // Takes one of them as the batch at hand.
  void take_up(std::unique_ptr<Commands> batch) { commands_ = std::move(batch); }
  // Until what is deferred has ended. What failed says so where it is waited for.
  void reach_deferred() noexcept { ring_.reach(); }

  // `collect` gives back the leases of batches that are done. `pop` waits for the oldest batch, and gives back its
  // leases.
  void collect() { ring_.collect(); }
  void pop() { ring_.pop(); }
  bool in_flight() const { return !ring_.empty(); }

 private:
  Backend& backend_;
  StepStats* stats_ = nullptr;
  const Interruption* interruption_ = nullptr;
  int64_t ring_waits_ = 0;  // when the call began
  std::unique_ptr<Commands> commands_;
  std::vector<std::unique_ptr<Commands>>* ahead_ = nullptr;  // where batches go that are not submitted
  std::vector<Lease> leases_;                                // of the batch at hand
  int64_t held_ = 0;                                         // what it holds at; 0: nothing
  DeferredRing ring_;
};

}  // namespace moeflux
