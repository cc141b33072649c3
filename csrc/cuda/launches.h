// What the recording of ops asks of a CUDA device: launches and copies in order, and room for lists.
//
// The recording decides which kernel runs on which grid with which arguments. Everything beneath it (the driver,
// memory, when a batch runs and what a failure harms) is on the other side of this interface.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <type_traits>

#include "backend/backend.h"

namespace moeflux::cuda {

constexpr int64_t word_bytes = 4;
constexpr int64_t most_crossing_bytes = 4096;  // from one memory to the other, by a launch

struct Extent {
  uint32_t x = 1;
  uint32_t y = 1;
  uint32_t z = 1;
};

// Facts about a device.
struct Chip {
  std::string name;
  int major = 0;  // compute capability
  int minor = 0;
  uint32_t multiprocessors = 0;
  uint32_t shared_bytes = 0;  // that one block may have
  uint32_t shared_bytes_of_multiprocessor = 0;
  uint32_t max_threads = 0;  // of a block
  int64_t l2_bytes = 0;
  int64_t memory_bytes = 0;
  bool copies_together = false;  // whether one call of the driver begins several copies
  bool pins_arenas = false;      // whether memory that was there before may be pinned, at the address that the host has

  bool has(int wanted_major, int wanted_minor = 0) const {
    return major != wanted_major ? major > wanted_major : minor >= wanted_minor;
  }
  // Shared memory that a block may have where so many are on each multiprocessor. The chip itself takes some of each.
  uint32_t shared_bytes_beside(uint32_t blocks) const {
    constexpr uint32_t of_chip = 1 << 10;
    return std::min(shared_bytes, shared_bytes_of_multiprocessor / blocks - of_chip);
  }
};

// Whether sixteen bytes may be loaded at a time.
inline bool is_aligned(const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; }

// Room that the host writes while it records, and that kernels of the same batch read.
struct List {
  std::byte* host = nullptr;
  std::byte* device = nullptr;  // the address for kernels

  template <typename T>
  T* values() const {  // the host's
    return reinterpret_cast<T*>(host);
  }
};

// Memory that ops need besides their arguments, and that they keep from batch to batch.
struct RoomSize {
  const char* what;  // for messages
  int64_t bytes;
};

// The work of one batch, in order. Every op sees what those before it wrote.
class Launches {
 public:
  virtual ~Launches() = default;

  // Records an op. What the body throws ends the batch, and whoever waits for the batch gets it.
  template <typename Body>
  void op(const char* name, const Body& body) {
    attempt([&] {
      begin_op(name);
      body();
    });
  }
  // The same for what is no op.
  template <typename Body>
  void attempt(const Body& body) {
    if (error_) return;
    try {
      body();
    } catch (...) {
      error_ = std::current_exception();
    }
  }

  // `kernel` is the name of an `extern "C" __global__ void kernel(const Params params)` in a file of cuda/. Its only
  // argument is a struct of cuda/params.h, which holds sizes and addresses; it is copied. A grid without blocks is
  // nothing to do.
  virtual void launch(const char* kernel, Extent grid, uint32_t threads, uint32_t shared_bytes,
                      std::span<const std::byte> params) = 0;
  template <typename Params>
  void launch(const char* kernel, Extent grid, uint32_t threads, const Params& params, uint32_t shared_bytes = 0) {
    static_assert(std::is_trivially_copyable_v<Params>);
    launch(kernel, grid, threads, shared_bytes, std::as_bytes(std::span(&params, 1)));
  }
  // Between whichever memories.
  virtual void copy(View from, View to, int64_t bytes) = 0;
  // Aligned to 16 bytes. What the host wrote there until the batch was submitted is what kernels read.
  virtual List list(int64_t bytes) = 0;
  // The room of number `which` of those that CudaCommands asks for. It is as large as it was prepared; if that is less
  // than `bytes`, it grows, and what it held is lost.
  virtual View room(size_t which, int64_t bytes) = 0;
  // Bytes that were prepared, within which a room does not grow. No limit where nothing was prepared, as for single
  // ops.
  virtual int64_t room_limit(size_t which) const = 0;
  virtual const Chip& chip() const = 0;

  // As Commands has them.
  virtual void mark() = 0;
  virtual int64_t hold() = 0;
  // Whether what is recorded now begins when the host says so.
  virtual bool is_held() const = 0;
  virtual void after(const Ticket& copy) = 0;

 protected:
  // Counts it. DeviceError if a test wants this op to fail.
  virtual void begin_op(const char* name) = 0;

  std::exception_ptr error_;  // of the op that ended the batch
};

// Where an argument of a kernel lies; null for one that is not given.
template <typename T>
T* address(View view) {
  return view ? reinterpret_cast<T*>(view.bytes()) : nullptr;
}

}  // namespace moeflux::cuda
