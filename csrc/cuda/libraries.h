// NVIDIA's driver and its compiler, opened when somebody first asks. Nothing of them is needed to build or to install.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "cuda/driver_api.h"
#include "gpu/trial.h"

namespace moeflux::cuda {

using gpu::NoSuchDevice;

// The driver. It is opened once and stays. NoSuchDevice where there is none, DeviceError when it is too old.
const DriverApi& driver();

// NVRTC, the newest that is no newer than the driver. Null where there is none.
struct Compiler {
  CompilerApi api;
  int major = 0;
  int minor = 0;
  std::string path;

  std::string version() const { return concat(major, ".", minor); }
};
const Compiler* compiler();

// What the driver says about a result: "out of memory (CUDA_ERROR_OUT_OF_MEMORY)".
std::string words_of(Result result);
// DeviceError that begins with `what`, unless the result is success. If the driver has given up all that the process
// has on the GPU, the error says that instead.
void check(Result result, const std::string& what);

// Where packages of Python lie, which may bring NVRTC.
void set_package_folders(std::vector<std::string> folders);
// For tests: other libraries, or with empty names the machine's own.
void set_libraries(const std::string& driver, const std::string& compiler);

}  // namespace moeflux::cuda
