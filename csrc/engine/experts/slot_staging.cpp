#include "engine/experts/slot_staging.h"

#include <cstring>
#include <utility>

#include "core/arena.h"

namespace moeflux {

SlotStaging::SlotStaging(Backend& backend, const Buffer& slots, int threads, int64_t slot_bytes, bool looked_at)
    : backend_(backend), slots_(slots) {
  if (backend.shares_memory()) return;
  rooms_ = backend.allocate(threads * staging_bytes, Memory::staging, "expert reads");
  under_way_.resize(static_cast<size_t>(2 * threads));
  if (looked_at) brought_back_ = backend.allocate(slot_bytes, Memory::staging, "checked experts");
}

int64_t SlotStaging::planned_bytes(int threads, int64_t slot_bytes, bool looked_at) {
  return arena_bytes(threads * staging_bytes) + (looked_at ? arena_bytes(slot_bytes) : 0);
}

int64_t SlotStaging::bytes() const {
  int64_t bytes = 0;
  for (const Buffer* buffer : {rooms_.get(), brought_back_.get()})
    if (buffer) bytes += arena_bytes(buffer->bytes());
  return bytes;
}

std::span<std::byte> SlotStaging::rooms() const {
  if (!rooms_) return {};
  return {rooms_->host(), static_cast<size_t>(rooms_->bytes())};
}

Carry SlotStaging::carry() {
  if (!rooms_) return {};
  const auto place_of = [this](const std::byte* bytes) { return bytes - rooms_->host(); };
  const auto copy_from = [this, place_of](const std::byte* bytes) -> Ticket& {
    return under_way_[static_cast<size_t>(place_of(bytes) / (staging_bytes / 2))];
  };
  return {.begin =
              [=, this](std::span<const std::byte> bytes, int64_t place) {
                copy_from(bytes.data()) = backend_.copy({rooms_.get(), place_of(bytes.data())}, {&slots_, place},
                                                        static_cast<int64_t>(bytes.size()));
              },
          .end = [=](const std::byte* bytes) { std::exchange(copy_from(bytes), {}).wait(); }};
}

void SlotStaging::show(const Landing& slot, const std::function<void(std::span<const std::byte>)>& look) {
  if (!slot.is_carried()) return look(slot.memory());
  const std::lock_guard lock(looking_);
  backend_.copy({&slots_, slot.place()}, {brought_back_.get(), 0}, slot.bytes()).wait();
  look({brought_back_->host(), static_cast<size_t>(slot.bytes())});
}

}  // namespace moeflux
