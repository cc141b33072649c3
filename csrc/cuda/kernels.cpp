#include "cuda/kernels.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>

#include "core/threads.h"
#include "cuda/cubin_cache.h"
#include "gpu/kernel_text.h"

namespace moeflux::cuda {
namespace {

constexpr uint32_t usual_shared_bytes = 8 << 10;  // that every kernel may have without being told, besides its own

constexpr size_t most_compilers = 8;  // side by side: each takes a hundred megabytes

// Nothing is contracted: a kernel that wants a fused multiply-add writes one.
std::vector<std::string> options_for(const Unit& unit, const std::string& architecture) {
  std::vector<std::string> options = {"--gpu-architecture=" + architecture, "--std=c++17", "--fmad=false",
                                      "--generate-line-info"};
  if (!unit.kernel.empty()) {
    options.emplace_back("--define-macro=MOEFLUX_ALONE");
    options.push_back(concat("--define-macro=MAKE_", unit.kernel, "=1"));
  }
  return options;
}

std::string joined(const std::vector<std::string>& words) {
  std::string all;
  for (const std::string& word : words) all += word + "\n";
  return all;
}

// Ends a program of the compiler.
struct OpenProgram {
  const CompilerApi& api;
  Program program = nullptr;
  ~OpenProgram() {
    if (program) api.end(&program);
  }
};

}  // namespace

std::string kernel_text(const std::string& file) {
  return gpu::KernelTexts{gpu::cuda_files(), ".cuh", "MOEFLUX_CUDA_DIR"}.text(file);
}

// ---- Compiling ------------------------------------------------------------------------------------------------------

Compiled compile(const Compiler& compiler, const Unit& unit, const std::string& text, const std::string& architecture,
                 const std::vector<std::string>& more_options) {
  const CompilerApi& api = compiler.api;
  const std::string& file = unit.file;
  const auto require = [&](Result result) {
    if (result != success)
      throw DeviceError(concat("cuda: ", file, ".cuh: NVRTC ", compiler.version(), ": ", api.error_text(result)));
  };
  OpenProgram open = {api};
  require(api.make(&open.program, text.c_str(), (file + ".cu").c_str(), 0, nullptr, nullptr));
  std::vector<std::string> options = options_for(unit, architecture);
  options.insert(options.end(), more_options.begin(), more_options.end());
  std::vector<const char*> words;
  for (const std::string& option : options) words.push_back(option.c_str());
  const Result result = api.compile(open.program, static_cast<int>(words.size()), words.data());
  Compiled compiled;
  size_t bytes = 0;
  if (api.log_bytes(open.program, &bytes) == success && bytes > 1) {
    compiled.said.resize(bytes);
    require(api.log(open.program, compiled.said.data()));
    compiled.said.resize(bytes - 1);
  }
  if (result != success)
    throw DeviceError(concat("cuda: ", file, ".cuh does not compile for ", architecture, ": ",
                             compiled.said.empty() ? api.error_text(result) : compiled.said));
  require(api.cubin_bytes(open.program, &bytes));
  compiled.cubin.resize(bytes);
  require(api.cubin(open.program, compiled.cubin.data()));
  return compiled;
}

std::string architecture_of(const Chip& chip, const Compiler* compiler) {
  int best = chip.major * 10 + chip.minor;
  if (compiler) {
    int count = 0;
    check(compiler->api.architecture_count(&count), "cuda: nvrtcGetNumSupportedArchs");
    std::vector<int> known(static_cast<size_t>(count));
    check(compiler->api.architectures(known.data()), "cuda: nvrtcGetSupportedArchs");
    best = 0;
    for (const int each : known)
      if (each / 10 == chip.major && each % 10 <= chip.minor) best = std::max(best, each);
    if (best == 0)
      throw DeviceError(concat("cuda: NVRTC ", compiler->version(), " does not know ", chip.name,
                               " (compute capability ", chip.major, ".", chip.minor,
                               "): pip install -U \"moeflux[cuda]\""));
  }
  // Only the text for 9.0 itself may use what other chips of that generation do not have: wgmma.
  return concat("sm_", best, best == 90 ? "a" : "");
}

// ---- Keeping --------------------------------------------------------------------------------------------------------

namespace {

CubinKey key_of(const Unit& unit, const std::string& architecture) {
  return {kernel_text(unit.file), architecture, joined(options_for(unit, architecture))};
}

std::string version_of(const Compiler* compiler) { return compiler ? compiler->version() : ""; }

}  // namespace

std::string cubin_of(const Unit& unit, const Chip& chip) {
  const Compiler* maker = compiler();
  const std::string architecture = architecture_of(chip, maker);
  const CubinKey key = key_of(unit, architecture);
  if (std::optional<std::string> cubin = cached_cubin(key, version_of(maker))) return *std::move(cubin);
  if (!maker)
    throw DeviceError(
        "cuda: expected NVIDIA's compiler NVRTC, which makes the kernels, found none: pip install \"moeflux[cuda]\"");
  std::string cubin = compile(*maker, unit, key.text, architecture).cubin;
  cache_cubin(key, maker->version(), cubin);
  return cubin;
}

std::vector<std::string> to_compile(const std::vector<std::string>& units, const Chip& chip) {
  const Compiler* maker = compiler();
  if (!maker) return {};
  const std::string architecture = architecture_of(chip, maker);
  std::vector<std::string> missing = units;
  std::erase_if(missing, [&](const std::string& name) {
    return cached_cubin(key_of(unit_of(name), architecture), maker->version()).has_value();
  });
  return missing;
}

// ---- Loading --------------------------------------------------------------------------------------------------------

Kernels::~Kernels() {
  const Current current(*device_);
  for (const auto& [file, module] : modules_) device_->api().unload(module);
}

void Kernels::load(std::span<const std::string> units) {
  std::vector<Unit> missing;
  for (const std::string& name : units)
    if (!modules_.contains(name)) missing.push_back(unit_of(name));
  std::vector<std::string> cubins(missing.size());
  std::atomic<size_t> next = 0;
  const auto make = [&] {
    for (size_t at = next++; at < missing.size(); at = next++) cubins[at] = cubin_of(missing[at], device_->chip());
  };
  const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  Threads helpers("that compile kernels");
  for (size_t i = 1; i < std::min({missing.size(), cores, most_compilers}); ++i) helpers.start(make);
  make();
  helpers.join();
  for (size_t i = 0; i < missing.size(); ++i) load(missing[i], cubins[i]);
}

void Kernels::load(const Unit& unit, const std::string& cubin) {
  const Current current(*device_);
  ModuleHandle module = nullptr;
  const Result result = device_->api().load(&module, cubin.data());
  if (result == error_unsupported_ptx_version || result == error_invalid_image || result == error_no_binary_for_gpu)
    throw DeviceError(concat("cuda: the NVIDIA driver does not take what NVRTC ", version_of(compiler()), " made of ",
                             unit.file, ".cuh: ", words_of(result), ": update the driver"));
  check(result, "cuda: cuModuleLoadData");
  modules_.emplace(unit.name(), module);
}

Kernel& Kernels::get(const char* name, uint32_t shared_bytes) {
  const DriverApi& api = device_->api();
  auto found = kernels_.find(name);
  if (found == kernels_.end()) {
    const Unit unit = unit_of(name);
    if (!modules_.contains(unit.name())) load(unit, cubin_of(unit, device_->chip()));
    const Current current(*device_);
    FunctionHandle function = nullptr;
    check(api.function(&function, modules_.at(unit.name()), name),
          concat("cuda: expected a kernel ", name, " in ", unit.file, ".cuh"));
    found = kernels_.emplace(name, Kernel{function, usual_shared_bytes}).first;
  }
  Kernel& kernel = found->second;
  if (shared_bytes > kernel.shared_bytes) {
    const Current current(*device_);
    if (const Result result = api.set_function(kernel.function, function_shared_bytes, static_cast<int>(shared_bytes)))
      throw DeviceError(concat("kernel ", name, ": expected ", shared_bytes, " bytes of shared memory for a block, ",
                               device_->chip().name, " has ", device_->chip().shared_bytes, ": ", words_of(result)));
    kernel.shared_bytes = shared_bytes;
  }
  return kernel;
}

}  // namespace moeflux::cuda
