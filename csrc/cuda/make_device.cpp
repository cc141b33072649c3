#include "cuda/make_device.h"

#include <array>

#include "cuda/device.h"
#include "cuda/kernels.h"
#include "gpu/trial.h"

namespace moeflux::cuda {
namespace {

// With the smallest unit: those that a model needs are made when it is loaded.
gpu::Trial trial([] { Kernels(Device::open()).load(std::array{std::string("digits")}); });

}  // namespace

bool is_chosen() { return trial.works(); }

std::string failure() { return trial.failure(); }

void set_own_libraries(const std::string& driver, const std::string& compiler) {
  trial.again([&] { set_libraries(driver, compiler); });
}

}  // namespace moeflux::cuda
