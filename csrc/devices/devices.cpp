#include "devices/devices.h"

#include <algorithm>
#include <array>
#include <cstdlib>

#include "backend/cpu_backend.h"
#include "backend/deferred_backend.h"
#include "core/error.h"
#include "core/text.h"
#include "cuda/cuda_backend.h"
#include "cuda/make_device.h"
#include "metal/make_device.h"
#include "metal/metal_backend.h"

namespace moeflux {
namespace {

// The best device comes first.
constexpr std::array devices = {
    DeviceEntry{
        .name = "metal",
        .is_chosen = metal::is_chosen,
        .failure =
            [] {
              const std::string reason = metal::failure();
              return reason.empty() ? "" : concat("Metal does not work here, the CPU does the work: ", reason);
            },
        .maps_files = true,
        .shares_memory = true,
        .are_several = false,
        .max_bytes = [](int) { return metal::MetalBackend::max_bytes(*metal::make_device()); },
        .prepared_bytes = metal::MetalBackend::prepared_bytes,
        .prepared_host_bytes = nullptr,
        .delta_room = nullptr,
        .has_host_experts = false,
        .to_compile = nullptr,
        .hold = nullptr,
        .make = [](const BackendOptions&, int64_t fail_at_op) -> std::unique_ptr<Backend> {
          return std::make_unique<metal::MetalBackend>(metal::make_device(), metal::max_work(), fail_at_op);
        },
    },
    DeviceEntry{
        .name = "cuda",
        .is_chosen = cuda::is_chosen,
        .failure =
            [] {
              const std::string reason = cuda::failure();
              return reason.empty() ? "" : concat("CUDA does not work here, the CPU does the work: ", reason);
            },
        .maps_files = false,
        .shares_memory = false,
        .are_several = true,
        .max_bytes = [](int device) { return cuda::CudaBackend::max_bytes(*cuda::Device::open(device)); },
        .prepared_bytes = cuda::CudaBackend::prepared_bytes,
        .prepared_host_bytes = cuda::CudaBackend::prepared_host_bytes,
        .delta_room = cuda::CudaBackend::room_behind,
        .has_host_experts = true,
        .to_compile = cuda::CudaBackend::to_compile,
        .hold = [](int device) -> std::shared_ptr<const void> { return cuda::Device::open(device); },
        .make = [](const BackendOptions& options, int64_t fail_at_op) -> std::unique_ptr<Backend> {
          return std::make_unique<cuda::CudaBackend>(cuda::Device::open(options.device), fail_at_op);
        },
    },
    DeviceEntry{
        .name = "cpu",
        .is_chosen = [] { return true; },
        .failure = [] { return std::string(); },
        .maps_files = false,
        .shares_memory = true,
        .are_several = false,
        .max_bytes = nullptr,
        .prepared_bytes = CpuBackend::prepared_bytes,
        .prepared_host_bytes = nullptr,
        .delta_room = nullptr,
        .has_host_experts = false,
        .to_compile = nullptr,
        .hold = nullptr,
        .make = [](const BackendOptions& options, int64_t fail_at_op) -> std::unique_ptr<Backend> {
          return std::make_unique<CpuBackend>(options.isa, options.exact, options.threads, fail_at_op);
        },
    },
};

// "auto, cpu, cuda or metal"
std::string known_names() {
  std::string names = "auto";
  for (size_t i = devices.size(); i-- > 0;) names += concat(i ? ", " : " or ", devices[i].name);
  return names;
}

// Null for "auto".
const DeviceEntry* named(const char* what, const std::string& name) {
  if (name == "auto") return nullptr;
  const auto found = std::ranges::find_if(devices, [&](const DeviceEntry& entry) { return entry.name == name; });
  if (found == devices.end())
    throw ArgumentError(concat(what, ": expected ", known_names(), ", found ", in_quotes(name)));
  return &*found;
}

// The device that MOEFLUX_BACKEND says "auto" is; null where it says none.
const DeviceEntry* forced() {
  const char* name = std::getenv("MOEFLUX_BACKEND");
  return name ? named("MOEFLUX_BACKEND", name) : nullptr;
}

}  // namespace

const DeviceEntry& device_entry(const std::string& name) {
  if (const DeviceEntry* entry = named("backend", name)) return *entry;
  if (const DeviceEntry* entry = forced()) return *entry;
  return *std::ranges::find_if(devices, [](const DeviceEntry& entry) { return entry.is_chosen(); });
}

const DeviceEntry& device_entry(const std::string& name, int device) {
  const DeviceEntry& entry = device_entry(name);
  if (device < 0 || (device > 0 && !entry.are_several))
    throw ArgumentError(concat("device: expected ", entry.are_several ? "0 or more" : "0, there is one", ", found ",
                               device, " of ", entry.name));
  return entry;
}

std::string device_failure() {
  if (forced()) return "";
  for (const DeviceEntry& entry : devices) {
    if (entry.is_chosen()) return "";
    if (std::string failure = entry.failure(); !failure.empty()) return failure;
  }
  return "";
}

std::shared_ptr<const void> held_device(const std::string& name, int device) {
  const DeviceEntry* meant = named("backend", name);
  if (!meant) meant = forced();
  for (const DeviceEntry& entry : devices) {
    if (!entry.hold || (meant && meant != &entry)) continue;
    try {
      return entry.hold(device);
    } catch (const DeviceError&) {  // whoever needs it will hear why
    }
  }
  return nullptr;
}

std::unique_ptr<Backend> make_backend(const std::string& name, const BackendOptions& options,
                                      const BackendFaults& faults) {
  std::unique_ptr<Backend> backend = device_entry(name, options.device).make(options, faults.fail_at_op);
  if (faults.deferred || faults.apart)
    backend = std::make_unique<DeferredBackend>(std::move(backend), faults.apart, faults.fail_at_copy);
  return backend;
}

}  // namespace moeflux
