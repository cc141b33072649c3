#include "cuda/make_device.h"

#include "cuda/device.h"
#include "cuda/kernels.h"
#include "gpu/trial.h"

namespace moeflux::cuda {
namespace {

gpu::Trial trial([] { Kernels(Device::open()).load_all(); });

}  // namespace

bool is_chosen() { return trial.works(); }

std::string failure() { return trial.failure(); }

void set_own_libraries(const std::string& driver, const std::string& compiler) {
  trial.again([&] { set_libraries(driver, compiler); });
}

}  // namespace moeflux::cuda
