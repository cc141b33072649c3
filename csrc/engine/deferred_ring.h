// Expert batches submitted and not yet waited for, oldest first.
//
// A batch's leases are given back only when it has completed, so no slot is reused while a batch may read it. Pushing
// onto a full ring waits for the oldest batch. The destructor waits for all. A failed batch throws where it is waited
// for, and leaves the ring all the same. Pushing allocates nothing, so a submitted batch always gets in.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "core/lists.h"
#include "io/slot_cache.h"

namespace moeflux {

class DeferredRing {
  struct Entry {
    Ticket ticket;
    std::vector<Lease> leases;

    template <typename Self, typename Visit>
    static void each(Self& entry, int64_t max_leases, const Visit& visit) {
      visit(entry.leases, max_leases);
    }
  };

 public:
  // `max_leases` is the largest number that one batch has.
  DeferredRing(int depth, size_t max_leases);
  ~DeferredRing();
  DeferredRing(const DeferredRing&) = delete;
  DeferredRing& operator=(const DeferredRing&) = delete;

  // Bytes of its lists: planned, and held.
  static int64_t planned_tables(int depth, int64_t max_leases) { return depth * planned_bytes<Entry>(max_leases); }
  int64_t tables() const;

  // Takes the leases. `leases` comes back empty, with room for `max_leases`.
  void push(Ticket ticket, std::vector<Lease>& leases);
  // Drops the oldest batches that are done, without waiting.
  void collect();
  // Waits for the oldest batch and drops it. Does nothing when the ring is empty.
  void pop();
  // Waits for all of them, and leaves them there with their errors.
  void reach() noexcept;
  // Waits for all of them, even when one throws; then throws the first error.
  void drain();

  bool empty() const { return size_ == 0; }
  int64_t waits() const { return waits_; }  // of batches, since the ring was made

 private:
  std::vector<Entry> entries_;  // a circle of `depth`
  size_t oldest_ = 0;
  size_t size_ = 0;
  int64_t waits_ = 0;
};

}  // namespace moeflux
