// Kernels by name: their text compiled for one chip, or taken from the cache, and loaded into a device.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda/device.h"

namespace moeflux::cuda {

// Names of the files of kernels, without their ending, and the text of one, with what it includes in its place. For
// experiments, MOEFLUX_CUDA_DIR names a folder whose files are used instead.
std::vector<std::string> kernel_files();
std::string kernel_text(const std::string& file);

// What NVRTC makes of a text for an architecture ("sm_90a"), and what it says, which is nothing if nothing is wrong.
// DeviceError with the compiler's own words.
struct Compiled {
  std::string cubin;
  std::string said;
};
Compiled compile(const Compiler& compiler, const std::string& file, const std::string& text,
                 const std::string& architecture, const std::vector<std::string>& more_options = {});
// The architecture to compile for: the chip's own, or the last before it that the compiler knows.
std::string architecture_of(const Chip& chip, const Compiler* compiler);

// The cubin of a file for a chip: from the cache, or compiled, and then kept there. DeviceError when there is neither
// compiler nor cubin, or the compiler refuses.
std::string cubin_of(const std::string& file, const Chip& chip);
// Files that would have to be compiled first, which takes seconds. None where nobody could.
std::vector<std::string> files_to_compile(const Chip& chip);

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

  // Makes the kernels of every file ready. DeviceError when there are none, or the driver refuses them.
  void load_all();
  // One that is ready. DeviceError when no file has it, or `shared_bytes` is more than the chip has.
  Kernel& get(const char* name, uint32_t shared_bytes);

 private:
  void load(const std::string& file);

  std::shared_ptr<Device> device_;
  std::unordered_map<std::string, ModuleHandle> modules_;  // by file
  std::unordered_map<std::string, Kernel> kernels_;
};

}  // namespace moeflux::cuda
