#include "io/slot_cache.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "core/error.h"

namespace moeflux {
namespace {

void check_shape(const SlotCacheShape& shape, std::span<const std::byte> memory) {
  constexpr int64_t max_key = std::numeric_limits<int32_t>::max() / 2;
  if (shape.layers > 0 && shape.experts == 0 && shape.slots == 0) return;  // of layers without any
  const bool counts = shape.layers > 0 && shape.experts > 0 && shape.slots > 0 && shape.slot_bytes >= 0 &&
                      shape.slots <= max_key && shape.layers <= max_key / shape.experts;
  if (!counts)
    throw std::invalid_argument(concat("[SlotCache] expected layers, experts and slots, found ", shape.layers, ", ",
                                       shape.experts, " and ", shape.slots));
  if (memory.data() && static_cast<int64_t>(memory.size()) / shape.slots < shape.slot_bytes)
    throw std::invalid_argument(concat("[SlotCache] expected memory for ", shape.slots, " slots of ", shape.slot_bytes,
                                       " bytes, found ", memory.size(), " bytes"));
}

}  // namespace

// ---- Lease -----------------------------------------------------------------------------------------------------

Lease::Lease(Lease&& other) noexcept : cache_(std::exchange(other.cache_, nullptr)), slot_(other.slot_) {}

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    release();
    cache_ = std::exchange(other.cache_, nullptr);
    slot_ = other.slot_;
  }
  return *this;
}

void Lease::release() {
  if (cache_) std::exchange(cache_, nullptr)->release(slot_);
}

int64_t Lease::layer() const { return cache_->at(slot_).key / cache_->shape_.experts; }

int64_t Lease::expert() const { return cache_->at(slot_).key % cache_->shape_.experts; }

SlotState Lease::state() const { return cache_->at(slot_).state; }

std::span<std::byte> Lease::data() const {
  const auto bytes = static_cast<size_t>(cache_->shape_.slot_bytes);
  return cache_->memory_.subspan(static_cast<size_t>(slot_) * bytes, bytes);
}

Landing Lease::landing() const {
  const int64_t bytes = cache_->shape_.slot_bytes;
  return cache_->memory_.data() ? Landing(data()) : Landing::carried(slot_ * bytes, bytes);
}

// ---- SlotCache -------------------------------------------------------------------------------------------------

SlotCache::SlotCache(std::span<std::byte> memory, const SlotCacheShape& shape, CachePolicy policy,
                     int64_t ageing_period)
    : memory_(memory),
      shape_((check_shape(shape, memory), shape)),
      order_(policy, shape.layers * shape.experts, shape.slots, ageing_period) {
  make_lists(lists_, shape);
  std::ranges::fill(lists_.table, -1);
  std::iota(lists_.free.rbegin(), lists_.free.rend(), 0);
}

int64_t SlotCache::planned_tables(const SlotCacheShape& shape, CachePolicy policy) {
  return planned_bytes<Lists>(shape) + EvictionOrder::planned_tables(policy, shape.layers * shape.experts, shape.slots);
}

SlotCache::~SlotCache() { assert(leased_ == 0); }

size_t SlotCache::key_of(int64_t layer, int64_t expert) const {
  if (layer < 0 || layer >= shape_.layers || expert < 0 || expert >= shape_.experts)
    throw std::out_of_range(concat("[SlotCache] expected layer 0 to ", shape_.layers - 1, " and expert 0 to ",
                                   shape_.experts - 1, ", found layer ", layer, ", expert ", expert));
  return static_cast<size_t>(layer * shape_.experts + expert);
}

int64_t SlotCache::ready_slot(int64_t layer, int64_t expert) const {
  const int32_t slot = lists_.table[key_of(layer, expert)];
  return slot >= 0 && at(slot).state == SlotState::ready ? slot : -1;
}

SlotCache::Acquired SlotCache::acquire(int64_t layer, int64_t expert) {
  const size_t key = key_of(layer, expert);
  int32_t slot = lists_.table[key];
  const bool missing = slot < 0;
  if (missing) {
    slot = take_slot();
    if (slot < 0)
      throw StateError(concat("[SlotCache] expected a slot for layer ", layer, " expert ", expert, ", found all ",
                              shape_.slots, " leased"));
  }
  order_.use(static_cast<int32_t>(key));
  if (missing) {
    ++stats_.misses;
    begin_loading(slot, key, false);
    return {hold(slot), Found::missing};
  }
  if (std::exchange(at(slot).unused_guess, false)) ++stats_.guesses_used;
  const bool ready = at(slot).state == SlotState::ready;
  ++(ready ? stats_.hits : stats_.joined);
  return {hold(slot), ready ? Found::ready : Found::loading};
}

Lease SlotCache::guess(int64_t layer, int64_t expert, int64_t keep) {
  const size_t key = key_of(layer, expert);
  if (lists_.table[key] >= 0 || spare() <= keep) return {};
  const int32_t slot = take_slot();
  if (slot < 0) return {};
  ++stats_.guesses;
  begin_loading(slot, key, true);
  return hold(slot);
}

Lease SlotCache::share(const Lease& lease) {
  assert(lease.cache_ == this);
  return hold(lease.slot_);
}

void SlotCache::loaded(const Lease& lease) {
  assert(lease.cache_ == this && lease.state() == SlotState::loading);
  at(lease.slot_).state = SlotState::ready;
}

void SlotCache::failed(const Lease& lease) {
  assert(lease.cache_ == this && lease.state() == SlotState::loading);
  fail(at(lease.slot_));
}

bool SlotCache::drop(int64_t layer, int64_t expert) {
  const int32_t slot = lists_.table[key_of(layer, expert)];
  if (slot < 0 || at(slot).leases > 0) return false;
  order_.leave(slot);
  forget(slot);
  lists_.free.push_back(slot);
  return true;
}

void SlotCache::drop_all() {
  for (int32_t slot = order_.first(); slot >= 0; slot = order_.first()) {
    order_.leave(slot);
    forget(slot);
    lists_.free.push_back(slot);
  }
}

void SlotCache::set_elsewhere(int64_t layer, int64_t expert, bool elsewhere) {
  const int32_t slot = lists_.table[key_of(layer, expert)];
  if (slot < 0) return;
  Slot& found = at(slot);
  const bool can_go = found.leases == 0;
  if (can_go) order_.leave(slot);
  found.elsewhere = elsewhere;
  if (can_go) join(slot);
}

// An empty slot, or the one that is given up next; -1 when there is neither.
int32_t SlotCache::take_slot() {
  if (!lists_.free.empty()) {
    const int32_t slot = lists_.free.back();
    lists_.free.pop_back();
    return slot;
  }
  const int32_t slot = order_.first();
  if (slot < 0) return -1;
  order_.leave(slot);
  ++stats_.evictions;
  if (at(slot).unused_guess) ++stats_.guesses_wasted;
  forget(slot);
  return slot;
}

void SlotCache::begin_loading(int32_t slot, size_t key, bool guess) {
  lists_.table[key] = slot;
  filled_.fetch_add(1, std::memory_order_relaxed);
  at(slot) = {static_cast<int32_t>(key), 0, SlotState::loading, guess, false};
}

Lease SlotCache::hold(int32_t slot) {
  Slot& held = at(slot);
  if (held.leases++ == 0) {
    ++leased_;
    if (held.state == SlotState::ready) order_.leave(slot);
  }
  return {this, slot};
}

void SlotCache::release(int32_t slot) {
  Slot& held = at(slot);
  assert(held.leases > 0);
  if (--held.leases > 0) return;
  --leased_;
  if (held.state == SlotState::loading) fail(held);
  if (held.state == SlotState::ready && order_.policy() != CachePolicy::none) {
    join(slot);
    return;
  }
  if (held.state == SlotState::ready) forget(slot);
  lists_.free.push_back(slot);
}

void SlotCache::join(int32_t slot) {
  const Slot& joining = at(slot);
  if (joining.elsewhere)
    order_.join_first(slot);
  else
    order_.join(slot, joining.key, joining.unused_guess);
}

void SlotCache::forget(int32_t slot) {
  const int32_t key = at(slot).key;
  leave_table(key);
  at(slot).state = SlotState::empty;
  if (forgotten_) forgotten_(key / shape_.experts, key % shape_.experts);
}

void SlotCache::leave_table(int32_t key) {
  lists_.table[static_cast<size_t>(key)] = -1;
  filled_.fetch_sub(1, std::memory_order_relaxed);
}

void SlotCache::fail(Slot& slot) {
  ++stats_.failures;
  leave_table(slot.key);
  slot.state = SlotState::empty;
}

}  // namespace moeflux
