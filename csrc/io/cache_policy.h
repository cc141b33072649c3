// Which slot is given up next: the order in which evictable slots go.
//
// LRU gives up the slot whose last use ended longest ago. LFU gives up the expert used least often, and among equals
// the longest unused. It counts uses of every expert, held or not, and halves all counts every `ageing_period` uses, so
// that an expert that was popular does not stay for ever. In both, a guess of the look-ahead that nobody used goes
// before everything else, and before that, the last first, experts that another memory has too. With `none`, nothing is
// kept that nobody holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/choices.h"
#include "core/lists.h"

namespace moeflux {

// Slots in one list per level, as intrusive links. Every call is O(1), except the halving once in `ageing_period` uses.
class EvictionOrder {
 public:
  // `ageing_period` 0: ten uses per slot.
  EvictionOrder(CachePolicy policy, int64_t keys, int64_t slots, int64_t ageing_period = 0);

  CachePolicy policy() const { return policy_; }
  // Bytes of its lists: planned, and held.
  static int64_t planned_tables(CachePolicy policy, int64_t keys, int64_t slots) {
    return planned_bytes<Lists>(Shape{policy, keys, slots});
  }
  int64_t tables() const { return held_bytes(lists_, Shape{}); }
  // Counts that an expert is asked for.
  void use(int32_t key);
  // A slot that nobody holds any more joins as the last of its level, or of the lowest level if `unused_guess`.
  void join(int32_t slot, int32_t key, bool unused_guess);
  // Likewise, but it goes next.
  void join_first(int32_t slot);
  // The slot is held again, or was taken.
  void leave(int32_t slot);
  // The slot that goes next; -1 when none can.
  int32_t first() const;
  int64_t size() const { return size_; }

 private:
  static constexpr int32_t levels = 64;

  struct Link {
    int32_t before = 0;
    int32_t after = 0;
  };

  struct Shape {
    CachePolicy policy = CachePolicy::lru;
    int64_t keys = 0;
    int64_t slots = 0;
  };
  struct Lists {
    std::vector<uint8_t> counts;  // [key], LFU only; at most levels - 1
    std::vector<Link> links;      // [slot], then the heads of the levels: rings

    template <typename Self, typename Visit>
    static void each(Self& lists, const Shape& shape, const Visit& visit) {
      visit(lists.counts, shape.policy == CachePolicy::lfu ? shape.keys : 0);
      visit(lists.links, shape.slots + levels);
    }
  };

  int32_t head(int32_t level) const { return slots_ + level; }
  Link& at(int32_t node) { return lists_.links[static_cast<size_t>(node)]; }
  const Link& at(int32_t node) const { return lists_.links[static_cast<size_t>(node)]; }
  void halve();
  void insert(int32_t slot, int32_t before, int32_t after);
  void append_list(int32_t from, int32_t to);

  CachePolicy policy_;
  int32_t slots_;
  int64_t size_ = 0;
  int64_t ageing_period_;
  int64_t uses_ = 0;  // since the last halving
  Lists lists_;
};

}  // namespace moeflux
