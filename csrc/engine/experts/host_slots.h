// Slots of experts in memory of the host, for a device with memory of its own: between its slots and the files. Copies
// go from a slot to a slot.
#pragma once

#include <exception>
#include <memory>
#include <vector>

#include "backend/backend.h"
#include "io/lower_slots.h"

namespace moeflux {

class HostSlots {
 public:
  // `upper`: the device's slots, of which there are so many.
  HostSlots(const ExpertStore& store, ReadPool& pool, const SlotCacheShape& shape, CachePolicy policy, Backend& backend,
            const Buffer& upper, int64_t upper_slots, const ExpertCheck& check);

  LowerSlots& lower() { return lower_; }
  // Of the copy to a slot of the device.
  const Ticket& copy_to(int64_t upper) const { return copies_.to(upper); }
  View slot(int64_t slot) const { return {memory_.get(), slot * cache_.shape().slot_bytes}; }
  int64_t count() const { return cache_.shape().slots; }
  int64_t filled() const { return cache_.filled(); }
  // Bytes of the slots, and of lists: held, and planned.
  int64_t bytes() const { return memory_->bytes(); }
  int64_t tables() const { return cache_.tables() + lower_.tables() + copies_.tables(); }
  static int64_t planned_tables(const SlotCacheShape& shape, CachePolicy policy, const LoaderShape& loader,
                                int64_t upper_slots);

 private:
  class Copies final : public SlotCopies {
   public:
    Copies(Backend& backend, const Buffer& lower, const Buffer& upper, int64_t slot_bytes, int64_t upper_slots);
    void add(int64_t lower, int64_t upper) override;
    void begin() override;
    bool done(int64_t upper) const override { return together(upper).error || together(upper).ticket.done(); }
    void wait(int64_t upper) override;
    const Ticket& to(int64_t upper) const { return together(upper).ticket; }
    static int64_t planned_tables(int64_t upper_slots);
    int64_t tables() const;

   private:
    // Copies that began together.
    struct Together {
      Ticket ticket;
      std::exception_ptr error{};
    };
    const Together& together(int64_t upper) const { return *begun_[static_cast<size_t>(upper)]; }

    Backend& backend_;
    const Buffer& lower_;
    const Buffer& upper_;
    int64_t slot_bytes_;
    std::vector<std::shared_ptr<Together>> begun_;  // [slot of the device]
    std::vector<CopyArgs> added_;                   // to be begun
    std::vector<int64_t> added_to_;                 // their slots of the device
  };

  std::unique_ptr<Buffer> memory_;
  SlotCache cache_;
  Copies copies_;
  LowerSlots lower_;
};

}  // namespace moeflux
