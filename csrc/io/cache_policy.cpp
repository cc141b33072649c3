#include "io/cache_policy.h"

#include <algorithm>

namespace moeflux {

EvictionOrder::EvictionOrder(CachePolicy policy, int64_t keys, int64_t slots, int64_t ageing_period)
    : policy_(policy),
      slots_(static_cast<int32_t>(slots)),
      ageing_period_(ageing_period > 0 ? ageing_period : 10 * slots) {
  make_lists(lists_, Shape{policy, keys, slots});
  for (int32_t level = 0; level < levels; ++level) at(head(level)) = {head(level), head(level)};
}

void EvictionOrder::use(int32_t key) {
  if (policy_ != CachePolicy::lfu) return;
  uint8_t& count = lists_.counts[static_cast<size_t>(key)];
  if (count < levels - 1) ++count;
  if (++uses_ == ageing_period_) halve();
}

void EvictionOrder::join(int32_t slot, int32_t key, bool unused_guess) {
  int32_t level = 1;
  if (unused_guess)
    level = 0;
  else if (policy_ == CachePolicy::lfu)
    level = std::max<int32_t>(1, lists_.counts[static_cast<size_t>(key)]);
  insert(slot, at(head(level)).before, head(level));
}

void EvictionOrder::join_first(int32_t slot) { insert(slot, head(0), at(head(0)).after); }

void EvictionOrder::insert(int32_t slot, int32_t before, int32_t after) {
  at(slot) = {before, after};
  at(before).after = slot;
  at(after).before = slot;
  ++size_;
}

void EvictionOrder::leave(int32_t slot) {
  const Link link = at(slot);
  at(link.before).after = link.after;
  at(link.after).before = link.before;
  --size_;
}

int32_t EvictionOrder::first() const {
  for (int32_t level = 0; level < levels; ++level)
    if (at(head(level)).after != head(level)) return at(head(level)).after;
  return -1;
}

// Counts of 2n and 2n + 1 both become n. Slots whose count was 2n still go before those whose count was 2n + 1.
void EvictionOrder::halve() {
  uses_ = 0;
  for (uint8_t& count : lists_.counts) count /= 2;
  for (int32_t level = 2; level < levels; ++level) append_list(level, level / 2);
}

void EvictionOrder::append_list(int32_t from, int32_t to) {
  const Link moved = at(head(from));
  if (moved.after == head(from)) return;
  const int32_t last = at(head(to)).before;
  at(last).after = moved.after;
  at(moved.after).before = last;
  at(moved.before).after = head(to);
  at(head(to)).before = moved.before;
  at(head(from)) = {head(from), head(from)};
}

}  // namespace moeflux
