// Experts in memory: a fixed number of slots, each holding one (layer, expert) or nothing.
//
// A Lease keeps a slot: while one lives, the slot is neither given to another expert nor moved. Asking for an expert
// that is not there takes an empty slot, or the one that the policy gives up, and leaves it loading. The asker brings
// the bytes and says `loaded` or `failed`. An expert is found from the asking until its failure or eviction. A slot
// whose last lease goes while it is loading is forgotten as if it had failed, so a half-read expert is never found.
//
// The memory is the caller's and must outlive the cache, and the cache must outlive its leases. It is not for several
// threads: the calls of an engine take turns.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "core/lists.h"
#include "io/cache_policy.h"
#include "io/landing.h"

namespace moeflux {

enum class SlotState : uint8_t { empty, loading, ready };

struct SlotCacheStats {
  int64_t hits = 0;       // asked for and ready
  int64_t joined = 0;     // asked for while it was being loaded: by a late guess, or for another asker
  int64_t misses = 0;     // asked for and not there
  int64_t evictions = 0;  // of ready experts
  int64_t failures = 0;   // loads that did not end well
  int64_t guesses = 0;    // taken in by `guess`
  int64_t guesses_used = 0;
  int64_t guesses_wasted = 0;  // evicted without one use
};

class SlotCache;

class Lease {
 public:
  Lease() = default;
  Lease(Lease&& other) noexcept;
  Lease& operator=(Lease&& other) noexcept;
  ~Lease() { release(); }

  explicit operator bool() const { return cache_ != nullptr; }
  int64_t slot() const { return slot_; }
  int64_t layer() const;
  int64_t expert() const;
  SlotState state() const;            // empty: loading it failed
  std::span<std::byte> data() const;  // only where the host reaches it
  Landing landing() const;
  void release();

 private:
  friend class SlotCache;
  Lease(SlotCache* cache, int32_t slot) : cache_(cache), slot_(slot) {}
  SlotCache* cache_ = nullptr;
  int32_t slot_ = -1;
};

struct SlotCacheShape {
  int64_t layers = 0;
  int64_t experts = 0;  // of a layer
  int64_t slots = 0;
  int64_t slot_bytes = 0;  // 0: slots without memory, to try policies out
};

class SlotCache {
 public:
  enum class Found { ready, loading, missing };
  struct Acquired {
    Lease lease;
    Found found = Found::missing;
  };

  // `memory` has shape.slots * shape.slot_bytes bytes, or none where the host does not reach it. EvictionOrder explains
  // `ageing_period`.
  SlotCache(std::span<std::byte> memory, const SlotCacheShape& shape, CachePolicy policy = CachePolicy::lru,
            int64_t ageing_period = 0);
  ~SlotCache();  // there must be no lease left
  SlotCache(const SlotCache&) = delete;
  SlotCache& operator=(const SlotCache&) = delete;

  const SlotCacheShape& shape() const { return shape_; }
  const SlotCacheStats& stats() const { return stats_; }
  // Bytes besides the slots: planned, and held.
  static int64_t planned_tables(const SlotCacheShape& shape, CachePolicy policy);
  int64_t tables() const { return held_bytes(lists_, shape_) + order_.tables(); }
  // Slots that a miss could take now.
  int64_t spare() const { return static_cast<int64_t>(lists_.free.size()) + order_.size(); }
  int64_t leased() const { return leased_; }  // slots
  // That have an expert, or will have one when it is loaded. Asked from any thread.
  int64_t filled() const { return filled_.load(std::memory_order_relaxed); }
  // std::out_of_range in these when there is no such layer or expert.
  bool contains(int64_t layer, int64_t expert) const { return lists_.table[key_of(layer, expert)] >= 0; }

  // The slot of an expert that is there and may be used; -1 when it is not.
  int64_t ready_slot(int64_t layer, int64_t expert) const;

  // A lease on the expert's slot. If the expert was missing, the slot is loading and the caller must fill it.
  // StateError when it is missing and every slot is leased; nothing has changed then.
  Acquired acquire(int64_t layer, int64_t expert);
  // Like a miss of `acquire`, for an expert that may be asked for soon. Empty when it is there already, or when no more
  // than `keep` slots are spare: those are for demanded experts.
  Lease guess(int64_t layer, int64_t expert, int64_t keep);
  // One more lease on the same slot.
  Lease share(const Lease& lease);

  // The caller says how loading ended. `failed` forgets the expert at once; the slot is empty once its last lease is
  // gone.
  void loaded(const Lease& lease);
  void failed(const Lease& lease);

  // Forgets an expert that nobody holds. False when somebody does, or when it is not there.
  bool drop(int64_t layer, int64_t expert);
  void drop_all();

  // An expert that is elsewhere too goes before those that are here alone: the last that came there first, because it
  // will stay there longest. Does nothing if it is not here.
  void set_elsewhere(int64_t layer, int64_t expert, bool elsewhere);
  // `forgotten` is told from now on which ready expert has lost its slot. It must not call the cache.
  void watch(std::function<void(int64_t layer, int64_t expert)> forgotten) { forgotten_ = std::move(forgotten); }
  // The slot whose memory that is.
  int64_t slot_at(const Landing& landing) const {
    return (landing.memory().data() - memory_.data()) / shape_.slot_bytes;
  }

 private:
  friend class Lease;

  struct Slot {
    int32_t key = -1;  // stays after a failure, for messages
    int32_t leases = 0;
    SlotState state = SlotState::empty;
    bool unused_guess = false;
    bool elsewhere = false;
  };

  struct Lists {
    std::vector<int32_t> table;  // [layer, expert]: its slot, or -1
    std::vector<Slot> slots;
    std::vector<int32_t> free;  // a stack; room for every slot from the start

    template <typename Self, typename Visit>
    static void each(Self& lists, const SlotCacheShape& shape, const Visit& visit) {
      visit(lists.table, shape.layers * shape.experts);
      visit(lists.slots, shape.slots);
      visit(lists.free, shape.slots);
    }
  };

  size_t key_of(int64_t layer, int64_t expert) const;
  Slot& at(int32_t slot) { return lists_.slots[static_cast<size_t>(slot)]; }
  const Slot& at(int32_t slot) const { return lists_.slots[static_cast<size_t>(slot)]; }
  int32_t take_slot();
  void begin_loading(int32_t slot, size_t key, bool guess);
  Lease hold(int32_t slot);
  void release(int32_t slot);
  void forget(int32_t slot);
  void leave_table(int32_t key);
  void fail(Slot& slot);
  void join(int32_t slot);

  std::span<std::byte> memory_;
  SlotCacheShape shape_;
  EvictionOrder order_;
  Lists lists_;
  int64_t leased_ = 0;
  std::atomic<int64_t> filled_ = 0;
  SlotCacheStats stats_;
  std::function<void(int64_t layer, int64_t expert)> forgotten_;
};

}  // namespace moeflux
