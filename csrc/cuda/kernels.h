// Kernels by name: their text compiled for one chip, or taken from the cache, and loaded into a device.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda/device.h"
#include "cuda/kernel_list.h"

namespace moeflux::cuda {

// The text of a file of kernels, with what it includes in its place. For experiments, MOEFLUX_CUDA_DIR names a folder
// whose files are used instead.
std::string kernel_text(const std::string& file);

// What NVRTC makes of a unit for an architecture ("sm_90a"), and what it says, which is nothing if nothing is wrong.
// DeviceError with the compiler's own words.
struct Compiled {
  std::string cubin;
  std::string said;
};
Compiled compile(const Compiler& compiler, const Unit& unit, const std::string& text, const std::string& architecture,
                 const std::vector<std::string>& more_options = {});
// The architecture to compile for: the chip's own, or the last before it that the compiler knows.
std::string architecture_of(const Chip& chip, const Compiler* compiler);

// The cubin of a unit for a chip: from the cache, or compiled, and then kept there. DeviceError when there is neither
// compiler nor cubin, or the compiler refuses.
std::string cubin_of(const Unit& unit, const Chip& chip);
// Of these, the units that would have to be compiled first, by their names. None where nobody could.
std::vector<std::string> to_compile(const std::vector<std::string>& units, const Chip& chip);

struct Kernel {
  FunctionHandle function = nullptr;
  uint32_t shared_bytes = 0;  // that it was told to expect
};

class Kernels {
 public:
  explicit Kernels(std::shared_ptr<Device> device) : device_(std::move(device)) {}
  ~Kernels();
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  // Makes units ready, by their names, those that must be compiled side by side. DeviceError when the compiler or the
  // driver refuses one.
  void load(std::span<const std::string> units);
  // One by its name. If its unit is not ready, it is made so now. DeviceError when no unit has it, or `shared_bytes` is
  // more than the chip has.
  Kernel& get(const char* name, uint32_t shared_bytes);

 private:
  void load(const Unit& unit, const std::string& cubin);

  std::shared_ptr<Device> device_;
  std::unordered_map<std::string, ModuleHandle> modules_;  // by unit
  std::unordered_map<std::string, Kernel> kernels_;
};

}  // namespace moeflux::cuda
