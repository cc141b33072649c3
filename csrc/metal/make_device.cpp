#include "metal/make_device.h"

#include "metal/pipelines.h"

namespace moeflux::metal {
namespace {

MakeDevice make = make_own_device;
bool preferred = has_own_device;
double work = default_work;
gpu::Trial trial([] {
  if (!preferred) throw NoSuchDevice("metal: expected a device that \"auto\" prefers, found another");
  const std::unique_ptr<Device> device = make();
  Pipelines(*device).make_all(true);
});

}  // namespace

std::unique_ptr<Device> make_device() { return make(); }

bool is_chosen() { return trial.works(); }

std::string failure() { return trial.failure(); }

double max_work() { return work; }

void set_make_device(MakeDevice other, bool is_preferred, double max_work) {
  trial.again([&] {
    make = other ? other : make_own_device;
    preferred = other ? is_preferred : has_own_device;
    work = other ? max_work : default_work;
  });
}

#if !defined(__APPLE__)
std::unique_ptr<Device> make_own_device() {
  throw NoSuchDevice("metal: expected macOS on Apple silicon, found another system");
}
#endif

}  // namespace moeflux::metal
