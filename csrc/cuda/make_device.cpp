#include "cuda/make_device.h"

#include <mutex>
#include <optional>

#include "cuda/device.h"
#include "cuda/kernels.h"

namespace moeflux::cuda {
namespace {

struct Trial {
  bool works = false;
  std::string failure;
};

std::mutex trial_mutex;
std::optional<Trial> tried;

Trial try_device() {
  try {
    Kernels(Device::open()).load_all();
    return {true, ""};
  } catch (const NoSuchDevice&) {
    return {};
  } catch (const Error& error) {
    return {false, error.what()};
  }
}

Trial trial() {
  const std::lock_guard lock(trial_mutex);
  if (!tried) tried = try_device();
  return *tried;
}

}  // namespace

bool is_chosen() { return trial().works; }

std::string failure() { return trial().failure; }

void set_own_libraries(const std::string& driver, const std::string& compiler) {
  const std::lock_guard lock(trial_mutex);
  tried.reset();
  set_libraries(driver, compiler);
}

}  // namespace moeflux::cuda
