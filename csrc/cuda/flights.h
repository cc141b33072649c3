// Batches that were launched and have not ended, each with the event behind it and what must live until then.
#pragma once

#include <deque>
#include <memory>
#include <mutex>

#include "cuda/device.h"
#include "gpu/flight.h"

namespace moeflux::cuda {

class Flights {
 public:
  explicit Flights(std::shared_ptr<Device> device) : device_(std::move(device)) {}

  // The number of a batch that was launched. `kept` lives until it has ended.
  int64_t depart(std::shared_ptr<Event> end, std::shared_ptr<const void> kept);
  // Waits for a batch. DeviceError, on every call, when it has failed, or one before it that it built on.
  void wait(int64_t number);
  // The same from what is known now, without waiting.
  void check(int64_t number);
  bool arrived(int64_t number);
  void wait_for_all();
  // As gpu::Flight has it.
  bool heal() { return flight_.heal(); }

 private:
  struct Batch {
    int64_t number;
    std::shared_ptr<Event> end;
    std::shared_ptr<const void> kept;
  };

  // All up to this one have ended so.
  void arrive(int64_t number, Result result);
  std::shared_ptr<Event> end_of(int64_t number);

  std::shared_ptr<Device> device_;
  gpu::Flight flight_;
  std::mutex mutex_;
  std::deque<Batch> under_way_;
};

// "the GPU failed: an illegal memory access was encountered (CUDA_ERROR_ILLEGAL_ADDRESS)"
std::string failure_of(Result result);

}  // namespace moeflux::cuda
