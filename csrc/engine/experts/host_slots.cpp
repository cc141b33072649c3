#include "engine/experts/host_slots.h"

#include <utility>

namespace moeflux {

HostSlots::Copies::Copies(Backend& backend, const Buffer& lower, const Buffer& upper, int64_t slot_bytes,
                          int64_t upper_slots)
    : backend_(backend),
      lower_(lower),
      upper_(upper),
      slot_bytes_(slot_bytes),
      tickets_(static_cast<size_t>(upper_slots)) {}

void HostSlots::Copies::begin(int64_t lower, int64_t upper) {
  tickets_[static_cast<size_t>(upper)] =
      backend_.copy({&lower_, lower * slot_bytes_}, {&upper_, upper * slot_bytes_}, slot_bytes_);
}

void HostSlots::Copies::wait(int64_t upper) {
  Ticket ticket = std::exchange(tickets_[static_cast<size_t>(upper)], {});
  ticket.wait();
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
         upper_slots * static_cast<int64_t>(sizeof(Ticket));
}

}  // namespace moeflux
