#include "engine/experts/slot_staging.h"

#include <cstring>

#include "core/arena.h"

namespace moeflux {

SlotStaging::SlotStaging(Backend& backend, const Buffer& slots, int threads, int64_t slot_bytes, bool looked_at)
    : backend_(backend), slots_(slots) {
  if (backend.shares_memory()) return;
  rooms_ = backend.allocate(threads * staging_bytes, Memory::staging, "expert reads");
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

Carry SlotStaging::carry() const {
  if (!rooms_) return {};
  return [this](std::span<const std::byte> bytes, int64_t place) {
    const View room = {rooms_.get(), bytes.data() - rooms_->host()};
    backend_.copy(room, {&slots_, place}, static_cast<int64_t>(bytes.size())).wait();
  };
}

void SlotStaging::show(const Landing& slot, const std::function<void(std::span<const std::byte>)>& look) {
  if (!slot.is_carried()) return look(slot.memory());
  const std::lock_guard lock(looking_);
  backend_.copy({&slots_, slot.place()}, {brought_back_.get(), 0}, slot.bytes()).wait();
  look({brought_back_->host(), static_cast<size_t>(slot.bytes())});
}

}  // namespace moeflux
