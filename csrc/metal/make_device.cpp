#include "metal/make_device.h"

#include <mutex>
#include <optional>

#include "core/error.h"
#include "metal/pipelines.h"

namespace moeflux::metal {
namespace {

MakeDevice make = make_own_device;
bool preferred = has_own_device;
double work = usual_work;
std::mutex mutex;
std::optional<std::string> tried;

}  // namespace

std::unique_ptr<Device> make_device() { return make(); }

bool is_preferred() { return preferred; }

std::string failure() {
  const std::lock_guard lock(mutex);
  if (!tried) {
    tried = "";
    try {
      if (!preferred) return *tried;
      const std::unique_ptr<Device> device = make();
      Pipelines(*device).make_all();
    } catch (const Error& error) {
      tried = error.what();
    }
  }
  return *tried;
}

double most_work() { return work; }

void set_make_device(MakeDevice other, bool is_preferred, double most_work) {
  const std::lock_guard lock(mutex);
  tried.reset();
  make = other ? other : make_own_device;
  preferred = other ? is_preferred : has_own_device;
  work = other ? most_work : usual_work;
}

#if !defined(__APPLE__)
std::unique_ptr<Device> make_own_device() {
  throw DeviceError("metal: expected macOS on Apple silicon, found another system");
}
#endif

}  // namespace moeflux::metal
