// Host memory between the threads that read and slots in a device's own memory. Each thread has a room of two halves:
// while it reads into one, the bytes that it read into the other are copied to their slot. One more room takes a whole
// slot that is to be looked at again. If memory is shared, there is none of this.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <span>

#include "backend/backend.h"
#include "io/landing.h"
#include "io/read_pool.h"

namespace moeflux {

class SlotStaging {
 public:
  // `looked_at`: whether there is room for a slot that is brought back.
  SlotStaging(Backend& backend, const Buffer& slots, int threads, int64_t slot_bytes, bool looked_at);
  // Bytes of memory: planned, and held.
  static int64_t planned_bytes(int threads, int64_t slot_bytes, bool looked_at);
  int64_t bytes() const;

  // For a ReadPool.
  std::span<std::byte> rooms() const;
  Carry carry();

  // Shows a slot to `look`: in place, or brought back. From any thread.
  void show(const Landing& slot, const std::function<void(std::span<const std::byte>)>& look);

 private:
  Backend& backend_;
  const Buffer& slots_;
  std::unique_ptr<Buffer> rooms_;
  std::mutex looking_;
  std::unique_ptr<Buffer> brought_back_;
};

}  // namespace moeflux
