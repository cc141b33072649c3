#include "engine/experts/host_slots.h"

#include <utility>

#include "core/lists.h"

namespace moeflux {

HostSlots::Copies::Copies(Backend& backend, const Buffer& lower, const Buffer& upper, int64_t slot_bytes,
                          int64_t upper_slots)
    : backend_(backend),
      lower_(lower),
      upper_(upper),
      slot_bytes_(slot_bytes),
      begun_(static_cast<size_t>(upper_slots)) {
  added_.reserve(begun_.size());
  added_to_.reserve(begun_.size());
}

int64_t HostSlots::Copies::planned_tables(int64_t upper_slots) {
  return upper_slots *
         (entry_bytes<decltype(begun_)> + entry_bytes<decltype(added_)> + entry_bytes<decltype(added_to_)>);
}

int64_t HostSlots::Copies::tables() const {
  const auto held = [](const auto& list) {
    return static_cast<int64_t>(list.capacity()) * entry_bytes<decltype(list)>;
  };
  return held(begun_) + held(added_) + held(added_to_);
}

void HostSlots::Copies::add(int64_t lower, int64_t upper) {
  added_.push_back({{&lower_, lower * slot_bytes_}, {&upper_, upper * slot_bytes_}, slot_bytes_});
  added_to_.push_back(upper);
}

void HostSlots::Copies::begin() {
  if (added_.empty()) return;
  const auto together = std::make_shared<Together>();
  try {
    together->ticket = backend_.copy_all(added_);
  } catch (...) {
    together->error = std::current_exception();
  }
  for (const int64_t upper : added_to_) begun_[static_cast<size_t>(upper)] = together;
  added_.clear();
  added_to_.clear();
}

void HostSlots::Copies::wait(int64_t upper) {
  const std::shared_ptr<Together> together = std::exchange(begun_[static_cast<size_t>(upper)], {});
  if (together->error) std::rethrow_exception(together->error);
  together->ticket.reach();  // spins: whoever computes waits for it
}

HostSlots::HostSlots(const ExpertStore& store, ReadPool& pool, const SlotCacheShape& shape, CachePolicy policy,
                     Backend& backend, const Buffer& upper, int64_t upper_slots, const ExpertCheck& check)
    : memory_(backend.allocate(shape.slots * shape.slot_bytes, Memory::staging, "host slots")),
      cache_({memory_->host(), static_cast<size_t>(memory_->bytes())}, shape, policy),
      copies_(backend, *memory_, upper, shape.slot_bytes, upper_slots),
      lower_(store, pool, cache_, copies_, upper_slots, check) {}

int64_t HostSlots::planned_tables(const SlotCacheShape& shape, CachePolicy policy, const LoaderShape& loader,
                                  int64_t upper_slots) {
  return SlotCache::planned_tables(shape, policy) + LowerSlots::planned_tables(loader, upper_slots) +
         Copies::planned_tables(upper_slots);
}

}  // namespace moeflux
