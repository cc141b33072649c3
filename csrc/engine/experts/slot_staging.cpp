#include "engine/experts/slot_staging.h"

#include <cstring>
#include <utility>

#include "core/arena.h"

namespace moeflux {
namespace {

class Copied final : public Carried {
 public:
  explicit Copied(Ticket copy) : copy_(std::move(copy)) {}
  bool done() const override { return copy_.done(); }
  void wait() override { copy_.wait(); }

 private:
  Ticket copy_;
};

}  // namespace

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

Carry SlotStaging::carry() {
  if (!rooms_) return {};
  return [this](std::span<const std::byte> bytes, int64_t place) {
    const View from = {rooms_.get(), bytes.data() - rooms_->host()};
    return std::make_shared<Copied>(backend_.copy(from, {&slots_, place}, static_cast<int64_t>(bytes.size())));
  };
}

void SlotStaging::show(const Landing& slot, const std::function<void(std::span<const std::byte>)>& look) {
  if (!slot.is_carried()) return look(slot.memory());
  const std::lock_guard lock(looking_);
  backend_.copy({&slots_, slot.place()}, {brought_back_.get(), 0}, slot.bytes()).wait();
  look({brought_back_->host(), static_cast<size_t>(slot.bytes())});
}

}  // namespace moeflux
