// Slots of the host's memory, below those of a device with memory of its own: experts are read into them, and copied
// from them to a slot above.
//
// A copy holds a lease on the slot that it reads, so nothing is read into that slot before the copy has ended. An
// expert that is in a slot above is the next that is given up here, so the two memories together hold as many different
// experts as they can. Like the cache, it is not for several threads; only copies are begun by the threads that read.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "core/lists.h"
#include "io/expert_loader.h"
#include "io/slot_cache.h"

namespace moeflux {

// Copies of whole slots, beside all else. One at a time goes to a slot above. One thread at a time calls all but
// `wait`, and `wait` may be called while others begin.
class SlotCopies {
 public:
  virtual ~SlotCopies() = default;
  virtual void add(int64_t lower, int64_t upper) = 0;
  virtual void begin() = 0;  // those that were added; what goes wrong is for `wait`
  // Of a copy that has begun:
  virtual bool done(int64_t upper) const = 0;
  virtual void wait(int64_t upper) = 0;  // throws what went wrong
};

class LowerSlots {
 public:
  // All of these outlive it. `upper_slots`: how many there are above.
  LowerSlots(const ExpertStore& store, ReadPool& pool, SlotCache& cache, SlotCopies& copies, int64_t upper_slots,
             const ExpertCheck& check);

  // Begins to bring an expert to a slot above, and to read it if it is not here. False when there is no slot for that:
  // then nothing has begun.
  bool bring(int64_t layer, int64_t expert, int64_t upper, int64_t parts);
  // Begins the copies that `bring` has left: several begin together. So does whoever asks for one of them.
  void begin_copies();
  // Whether the copy to a slot above has begun.
  bool copies(int64_t upper);
  // Whether what `bring` began for a slot above is over.
  bool done(int64_t upper);
  // Returns when it is. Throws when reading or copying has failed. Either way nothing touches the slot above any more.
  void wait(int64_t upper);

  bool ready(int64_t layer, int64_t expert) const { return cache_.ready_slot(layer, expert) >= 0; }
  bool has(int64_t layer, int64_t expert) const { return cache_.contains(layer, expert); }  // or it is coming
  // Whether an expert is in a slot above.
  void set_above(int64_t layer, int64_t expert, bool above) { cache_.set_elsewhere(layer, expert, above); }
  // The reads.
  ExpertLoader& loader() { return loader_; }
  const ExpertLoader& loader() const { return loader_; }
  SlotCache& cache() { return cache_; }

  // Bytes of lists: planned, and held.
  static int64_t planned_tables(const LoaderShape& shape, int64_t upper_slots);
  int64_t tables() const { return loader_.tables() + held_bytes(lists_, Shape{}); }

 private:
  struct Shape {
    int64_t lower = 0;
    int64_t upper = 0;
  };
  // What is on its way to a slot above.
  struct Arrival {
    Lease lease;            // on the slot here
    bool is_added = false;  // the copy
  };
  struct Lists {
    std::vector<int32_t> wanted_by;  // [slot here]: the slot above, or -1
    std::vector<Arrival> arrivals;   // [slot above]

    template <typename Self, typename Visit>
    static void each(Self& lists, const Shape& shape, const Visit& visit) {
      visit(lists.wanted_by, shape.lower);
      visit(lists.arrivals, shape.upper);
    }
  };

  void was_read(const Landing& slot);
  void add_copy(int64_t lower, int64_t upper);
  Arrival& arrival(int64_t upper) { return lists_.arrivals[static_cast<size_t>(upper)]; }
  int32_t& wanted_by(int64_t lower) { return lists_.wanted_by[static_cast<size_t>(lower)]; }

  SlotCache& cache_;
  SlotCopies& copies_;
  std::mutex mutex_;  // of `wanted_by` and `is_added`, and of copies while they begin
  Lists lists_;
  ExpertLoader loader_;  // last: its threads call `was_read`
};

}  // namespace moeflux
