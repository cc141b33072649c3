// All devices, in one table. The engine gets a backend here without naming it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.h"

namespace moeflux {

// `device` says which of several GPUs. `isa`, `exact` and `threads` are for the CPU. An empty `isa` and 0 threads leave
// the choice to it. With `exact`, all products and attention compute with f32 numbers.
struct BackendOptions {
  std::string isa;
  bool exact = false;
  int threads = 0;
  int device = 0;
};

// For tests: the op of number `fail_at_op`, counted from 0 over all batches, fails with DeviceError. With `deferred`,
// ops run on another thread some time after their batch was submitted; with `apart`, the device has memory of its own
// as well (see DeferredBackend), and its copy of number `fail_at_copy`, of those beside the batches, fails too.
struct BackendFaults {
  int64_t fail_at_op = -1;
  bool deferred = false;
  bool apart = false;
  int64_t fail_at_copy = -1;
};

// What is known of a device before there is a backend for it. A new one is a row of the table in devices.cpp.
struct DeviceEntry {
  const char* name;
  bool (*is_chosen)();               // whether "auto" means it, if none before it in the table is chosen
  std::string (*failure)();          // why it is not chosen where it should be; empty otherwise
  bool maps_files;                   // whether weights are used in their mapped file: Backend::map
  bool shares_memory;                // whether it shares the host's: Backend::shares_memory
  bool are_several;                  // whether there may be more than one, which then have numbers from 0 on
  int64_t (*max_bytes)(int device);  // limit for all buffers; null: as much as the host has
  int64_t (*prepared_bytes)(const WorkSizes& sizes);  // what `prepare` takes
  int64_t (*prepared_host_bytes)(
      const WorkSizes& sizes);  // the part that is not in the device's own memory; null: none
  DeltaRoom delta_room;         // Backend::delta_room
  bool has_host_experts;        // whether HostExperts gives the bits of its experts
  // Kernels of a model with such rows of keys and values that take time to make, by names that `compile` knows; null:
  // none.
  std::vector<std::string> (*to_compile)(const WorkSizes& sizes, DType rows, int device);
  std::shared_ptr<const void> (*hold)(int device);  // opens it until nobody has that any more; null: nothing to open
  std::unique_ptr<Backend> (*make)(const BackendOptions& options, int64_t fail_at_op);
};

// `name` is "cpu", "cuda", "metal" or "auto". "auto" means what the environment variable MOEFLUX_BACKEND says, or else
// the best device that works here. For any other name, the ArgumentError lists those that there are.
const DeviceEntry& device_entry(const std::string& name);

// The same, if it may have that number. ArgumentError else.
const DeviceEntry& device_entry(const std::string& name, int device);

// Why "auto" is not the device that this machine should have. Empty when it is, or when there is no such device.
// Whoever talks to the user says it once.
std::string device_failure();

// What keeps that device open, for somebody who will ask much about it and then use it: to open a GPU takes tenths of a
// second. Null if there is nothing to open, or it does not open.
std::shared_ptr<const void> held_device(const std::string& name, int device);

// The backend of the device of that name. DeviceError when there is no such device here, or it does not work.
std::unique_ptr<Backend> make_backend(const std::string& name, const BackendOptions& options,
                                      const BackendFaults& faults = {});

}  // namespace moeflux
