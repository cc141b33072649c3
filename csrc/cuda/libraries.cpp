#include "cuda/libraries.h"

#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>

namespace moeflux::cuda {
namespace {

constexpr int oldest_driver = 12000;  // as the driver says it: 12.0

struct Names {
  std::string driver;
  std::string compiler;
};

std::mutex mutex;
std::vector<std::string> package_folders;
Names names;  // of tests; else empty
// Neither libraries nor their tables ever go: other parts of the process use the same ones.
std::deque<DriverApi> opened_drivers;
std::deque<Compiler> opened_compilers;
std::atomic<const DriverApi*> driver_api = nullptr;
pid_t opened_in = 0;  // the process
const Compiler* found_compiler = nullptr;
bool compiler_was_sought = false;

// "12.4" of 12040
std::string version_text(int version) { return concat(version / 1000, ".", version % 1000 / 10); }

void* symbol(void* library, const char* name, const std::string& path) {
  void* found = dlsym(library, name);
  if (!found)
    throw DeviceError(concat("cuda: expected ", name, " in ", path, ", found none: update the NVIDIA driver"));
  return found;
}

#define MOEFLUX_CUDA_FIND(here, there, ...) \
  api.here = reinterpret_cast<decltype(api.here)>(symbol(library, #there, path));
#define MOEFLUX_CUDA_SEEK(here, there, ...) api.here = reinterpret_cast<decltype(api.here)>(dlsym(library, #there));

DriverApi open_driver() {
  const std::string path = names.driver.empty() ? "libcuda.so.1" : names.driver;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw NoSuchDevice("cuda: expected the NVIDIA driver (libcuda.so.1), found none");
  // The version comes first: an old driver lacks some of the others.
  const auto version_of =
      reinterpret_cast<decltype(DriverApi::driver_version)>(symbol(library, "cuDriverGetVersion", path));
  int version = 0;
  version_of(&version);
  if (version < oldest_driver)
    throw DeviceError(concat("cuda: expected a driver for CUDA ", version_text(oldest_driver),
                             " or newer, found one for ", version_text(version), ": update the NVIDIA driver"));
  DriverApi api;
  MOEFLUX_CUDA_DRIVER(MOEFLUX_CUDA_FIND)
  MOEFLUX_CUDA_NEWER_DRIVER(MOEFLUX_CUDA_SEEK)
  const Result started = api.init(0);
  if (started == error_no_device) throw NoSuchDevice("cuda: expected an NVIDIA GPU, found a driver and no GPU");
  if (started != success) {
    const char* text = nullptr;
    api.error_text(started, &text);
    throw DeviceError(concat("cuda: the NVIDIA driver does not start: ", text ? text : "no reason given"));
  }
  return api;
}

std::optional<Compiler> open_compiler(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) return std::nullopt;
  CompilerApi api;
  MOEFLUX_CUDA_COMPILER(MOEFLUX_CUDA_FIND)
  Compiler compiler = {.api = api, .path = path};
  if (api.version(&compiler.major, &compiler.minor) != success) return std::nullopt;
  return compiler;
}

// In the packages nvidia-cuda-nvrtc (13) and nvidia-cuda-nvrtc-cu12, and where the loader looks. What a driver's own
// major version made, it can load; what a newer one made it cannot.
std::optional<Compiler> find_compiler(int driver_version) {
  if (!names.compiler.empty()) return open_compiler(names.compiler);
  struct Place {
    int major;
    const char* in_package;
    const char* by_name;
  };
  constexpr std::array places = {Place{13, "nvidia/cu13/lib/libnvrtc.so.13", "libnvrtc.so.13"},
                                 Place{12, "nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "libnvrtc.so.12"}};
  for (const Place& place : places) {
    if (place.major > driver_version / 1000) continue;
    for (const std::string& folder : package_folders) {
      const std::string path = concat(folder, "/", place.in_package);
      struct stat status;
      if (stat(path.c_str(), &status) != 0) continue;
      if (std::optional<Compiler> found = open_compiler(path)) return found;
    }
    if (std::optional<Compiler> found = open_compiler(place.by_name)) return found;
  }
  return std::nullopt;
}

#undef MOEFLUX_CUDA_FIND
#undef MOEFLUX_CUDA_SEEK

// Whether every later call fails likewise. After a fault of a kernel the driver gives up all that the process has
// there.
bool is_lasting(Result result) {
  constexpr std::array lasting = {214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721};
  return std::ranges::find(lasting, result) != lasting.end();
}

// What the driver holds for a process does not pass to its children, and in a child it cannot be started again.
const DriverApi& opened_driver() {
  if (!driver_api) {
    opened_in = getpid();
    driver_api = &opened_drivers.emplace_back(open_driver());
  }
  if (opened_in != getpid())
    throw DeviceError(concat("cuda: expected the process that began to use the GPU (", opened_in,
                             "), found a child that was forked from it (", getpid(),
                             "): start the child as a new program (\"spawn\" in Python's multiprocessing)"));
  return *driver_api;
}

// Whoever compiles for another machine needs no driver.
int driver_version() {
  int version = std::numeric_limits<int>::max();
  try {
    opened_driver().driver_version(&version);
  } catch (const DeviceError&) {
  }
  return version;
}

}  // namespace

const DriverApi& driver() {
  const std::lock_guard lock(mutex);
  return opened_driver();
}

const Compiler* compiler() {
  const std::lock_guard lock(mutex);
  if (!std::exchange(compiler_was_sought, true)) {
    if (std::optional<Compiler> found = find_compiler(driver_version()))
      found_compiler = &opened_compilers.emplace_back(*std::move(found));
  }
  return found_compiler;
}

std::string words_of(Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (const DriverApi* api = driver_api) {
    api->error_name(result, &name);
    api->error_text(result, &text);
  }
  return concat(text ? text : "no reason given", " (", name ? name : std::to_string(result), ")");
}

void check(Result result, const std::string& what) {
  if (result == success) return;
  if (is_lasting(result))
    throw DeviceError(concat("cuda: the GPU is lost to this process, because something failed there: ",
                             words_of(result), ": start the program again"));
  throw DeviceError(concat(what, ": ", words_of(result)));
}

void set_package_folders(std::vector<std::string> folders) {
  const std::lock_guard lock(mutex);
  package_folders = std::move(folders);
}

void set_libraries(const std::string& driver, const std::string& compiler) {
  const std::lock_guard lock(mutex);
  names = {driver, compiler};
  driver_api = nullptr;
  found_compiler = nullptr;
  compiler_was_sought = false;
}

}  // namespace moeflux::cuda
