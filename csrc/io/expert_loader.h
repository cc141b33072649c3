// Experts on demand: the store, the pool and the cache put together.
//
// While an expert is being read the loader holds a lease of its own, so that no slot is given to another expert under a
// thread that still writes into it, whatever becomes of the asker. Store, pool and cache must outlive the loader; its
// destructor waits for what is under way. Not for several threads, as the cache.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/lists.h"
#include "io/expert_store.h"
#include "io/read_pool.h"
#include "io/slot_cache.h"

namespace moeflux {

// Looks at an expert that was just read, and throws when it is not what it should be. Called by the threads that read.
using ExpertCheck = std::function<void(int64_t layer, int64_t expert, const Landing& slot)>;

// What a loader makes room for.
struct LoaderShape {
  int64_t slots = 0;
  int64_t experts = 0;  // of a layer
  int64_t pieces = 0;   // of an expert
  int threads = 0;      // that read

  int64_t loads() const;     // under way at once
  int64_t requests() const;  // of one of them
};

class ExpertLoader {
 public:
  ExpertLoader(const ExpertStore& store, ReadPool& pool, SlotCache& cache, ExpertCheck check = {});
  ~ExpertLoader();
  ExpertLoader(const ExpertLoader&) = delete;
  ExpertLoader& operator=(const ExpertLoader&) = delete;

  // A lease on the expert's slot, its read begun if it was not there; `parts` as ExpertStore::add_reads. Guesses under
  // way are given up when no slot is spare without them.
  SlotCache::Acquired demand(int64_t layer, int64_t expert, int64_t parts = 1);
  // Begins to read an expert that may be demanded soon, when more than `keep` slots are spare, in at most so many
  // parts: a wrong one is given up at the end of a part. False when it did not.
  bool guess(int64_t layer, int64_t expert, int64_t keep, int64_t parts);

  // The slot holds the expert, and has for all who look from now on. Throws what went wrong with its read.
  void wait(const Lease& lease);
  // That `wait` would not stand still.
  bool done(const Lease& lease) const;
  // A guess that was wrong: what has not begun of its reads is dropped. Nothing to do when it is none.
  void dismiss(int64_t layer, int64_t expert);
  // Lets go of the guesses whose reads are done, so that their slots can be used or given up. One that failed is
  // forgotten: whoever demands that expert meets the error.
  void collect();
  // Ends all guesses under way: their slots are spare.
  void give_up_guesses();
  // Ends everything under way, wanted or not.
  void give_up();
  bool has(int64_t layer, int64_t expert) const { return cache_.contains(layer, expert); }  // or is bringing it
  int64_t under_way() const {
    return static_cast<int64_t>(lists_.loads.size() - lists_.idle.size());
  }  // wanted or guessed
  // Bytes of its lists: what they will be with so many slots, and what they are.
  static int64_t planned_tables(const LoaderShape& shape);
  int64_t tables() const;
  // Of guesses, since the loader was made: bytes that were never read.
  int64_t dropped_guess_bytes() const { return dropped_; }
  int64_t begun() const { return begun_; }  // since the loader was made: experts whose reads have begun

 private:
  struct Load {
    // What the check looks at, on a thread that reads.
    int64_t layer = 0;
    int64_t expert = 0;
    Landing slot;
    Lease lease;
    bool guess = false;  // one of `guesses_`
    ReadBatch batch;     // last: it goes first
  };

  struct Lists {
    std::vector<std::unique_ptr<Load>> loads;  // more only when more than that are ever under way
    std::vector<Load*> idle;                   // of them
    std::vector<Load*> guesses;                // under way that nobody demanded
    std::vector<Load*> by_slot;                // under way; null for other slots

    template <typename Self, typename Visit>
    static void each(Self& lists, const LoaderShape& shape, const Visit& visit) {
      visit(lists.loads, shape.loads());
      visit(lists.idle, shape.loads());
      visit(lists.guesses, shape.loads());
      visit(lists.by_slot, shape.slots);
    }
  };

  // Bytes of a load with room for so many requests.
  static int64_t load_bytes(size_t requests) {
    return static_cast<int64_t>(sizeof(Load) + requests * sizeof(ReadRequest));
  }
  void add_load();
  void begin(Lease lease, bool guess, int64_t parts);
  void no_guess(Load& load);
  void finish(int64_t slot);
  void finish_quietly(int64_t slot);
  Load* load_of(int64_t slot) const;

  const ExpertStore& store_;
  ReadPool& pool_;
  SlotCache& cache_;
  ExpertCheck check_;
  LoaderShape shape_;
  Lists lists_;
  int64_t dropped_ = 0;
  int64_t begun_ = 0;
};

}  // namespace moeflux
