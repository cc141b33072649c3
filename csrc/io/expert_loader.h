// Experts on demand: the store, the pool and the cache put together. Where there are slots below, an expert comes from
// its file to a slot there, and is copied to its slot here. Only when no slot below is free is it read here at once.
//
// While an expert is being read, the loader holds a lease of its own. So no slot goes to another expert while a thread
// still writes into it, whatever becomes of the asker. Store, pool and cache must outlive the loader, and its
// destructor waits for reads that are under way. Like the cache, it is not for several threads.
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

class LowerSlots;

// Checks an expert that was just read, and throws when it is not what it should be. Called by the threads that read.
using ExpertCheck = std::function<void(int64_t layer, int64_t expert, const Landing& slot)>;

struct LoaderCounts {
  int64_t begun = 0;          // experts whose reads have begun
  int64_t under_way = 0;      // now, demanded or guessed
  int64_t bytes_read = 0;     // of what has begun, without what was dropped
  int64_t dropped_bytes = 0;  // of guesses that were never read
  int64_t found_below = 0;    // demanded experts that were in a slot below, or on their way there
  int64_t bytes_copied = 0;   // from below

  LoaderCounts& operator+=(const LoaderCounts& other);
};

// The sizes that a loader makes room for.
struct LoaderShape {
  int64_t slots = 0;
  int64_t experts = 0;  // of a layer
  int64_t pieces = 0;   // of an expert
  int threads = 0;      // that read

  int64_t loads() const;     // how many may be under way at once
  int64_t requests() const;  // how many one of them has
};

class ExpertLoader {
 public:
  ExpertLoader(const ExpertStore& store, ReadPool& pool, SlotCache& cache, ExpertCheck check = {},
               LowerSlots* lower = nullptr);
  ~ExpertLoader();
  ExpertLoader(const ExpertLoader&) = delete;
  ExpertLoader& operator=(const ExpertLoader&) = delete;

  // A lease on the expert's slot. Begins its read if it was not there, in `parts` as in ExpertStore::add_reads. Gives
  // up guesses that are under way if no slot is spare without them.
  SlotCache::Acquired demand(int64_t layer, int64_t expert, int64_t parts = 1);
  // Begins to read an expert that may be demanded soon, if more than `keep` slots are spare, in at most so many parts.
  // A wrong guess is given up at the end of a part. False when it began nothing.
  bool guess(int64_t layer, int64_t expert, int64_t keep, int64_t parts);

  // Experts that come from below have their copies begun together, at the latest when somebody asks for one of them.
  void begin_copies();

  // Returns when the slot holds the expert, for everybody from now on. Throws what went wrong with its read.
  void wait(const Lease& lease);
  // Whether `wait` would return at once.
  bool done(const Lease& lease) const;
  // Whether the expert is only being copied from a slot below: the disk has no part in it any more.
  bool is_copied(const Lease& lease) const;
  // The guess was wrong: drops those of its reads that have not begun, and forgets the expert if there were any. Its
  // slot is spare when its last read has ended. Does nothing if the expert is no guess.
  void dismiss(int64_t layer, int64_t expert);
  // Lets go of the guesses whose reads are done, so that their slots can be used or given up. A failed guess is
  // forgotten: whoever demands that expert meets the error.
  void collect();
  // Ends all guesses under way: their slots are spare.
  void give_up_guesses();
  // Ends everything under way, demanded or not.
  void give_up();
  // Whether the expert is in a slot, here or below, or on its way.
  bool has(int64_t layer, int64_t expert) const;
  // Whether `guess` has nothing to do for it.
  bool needs_no_guess(int64_t layer, int64_t expert) const;
  // Bytes of its lists: planned for so many slots, and held.
  static int64_t planned_tables(const LoaderShape& shape);
  int64_t tables() const;
  // All of these are of reads of files, here and below, since the loader was made, but for `bytes_copied`, which is of
  // what came from below.
  LoaderCounts counts() const;

 private:
  struct Load {
    // What the check looks at, on a thread that reads.
    int64_t layer = 0;
    int64_t expert = 0;
    Landing slot;
    Lease lease;
    bool guess = false;       // one of `guesses_`
    bool from_below = false;  // no use of the batch
    ReadBatch batch;          // last: it goes first
  };

  struct Lists {
    std::vector<std::unique_ptr<Load>> loads;  // grows only if more are ever under way at once
    std::vector<Load*> idle;                   // those of them that are not in use
    std::vector<Load*> guesses;                // those under way that nobody demanded
    std::vector<Load*> by_slot;                // those under way; null for other slots

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
    return static_cast<int64_t>(sizeof(Load)) + ReadBatch::planned_tables(requests);
  }
  void add_load();
  void begin(Lease lease, bool guess, int64_t parts);
  bool is_over(const Load& load) const;
  int64_t drop(Load& load);
  bool complete(Load& load);
  void no_guess(Load& load);
  void finish(int64_t slot);
  void finish_quietly(int64_t slot);
  Load* load_of(int64_t slot) const;

  const ExpertStore& store_;
  ReadPool& pool_;
  SlotCache& cache_;
  ExpertCheck check_;
  LoaderShape shape_;
  LowerSlots* lower_;
  Lists lists_;
  LoaderCounts counts_;
};

}  // namespace moeflux
