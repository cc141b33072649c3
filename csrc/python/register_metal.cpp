// What Python sees of Metal: whether it works, its facts, its kernels.
#include <pybind11/stl.h>

#include "devices/devices.h"
#include "metal/make_device.h"
#include "metal/metal_backend.h"
#include "metal/pipelines.h"
#include "metal/shaders.h"
#include "python/bindings.h"
#include "python/class.h"

namespace py = pybind11;

namespace moeflux::python {
namespace {

struct HeldDevice {
  std::shared_ptr<const void> device;
};

}  // namespace

void register_metal(py::module_& m) {
  m.def(
      "chosen_backend", [](const std::string& name) { return device_entry(name).name; }, py::arg("name"),
      py::call_guard<Released>(), "The device that `auto` means here. Any other name stays as it is.");
  m.def(
      "device_failure", &device_failure, py::call_guard<Released>(),
      "Why `auto` is not the device that this machine should have. Empty when it is, or when there is no such device.");
  Class<HeldDevice>(m, "HeldDevice", "A device that stays open as long as this lives.");
  m.def(
      "held_device", [](const std::string& backend, int device) { return HeldDevice{held_device(backend, device)}; },
      py::arg("backend"), py::arg("device"), py::call_guard<Released>(),
      "Opens the device once for all that follows: planning, compiling and loading. Nothing if it does not open.");
  m.def(
      "device_memory",
      [](const std::string& backend, int number) -> std::optional<int64_t> {
        const DeviceEntry& device = device_entry(backend, number);
        return device.max_bytes ? std::optional(device.max_bytes(number)) : std::nullopt;
      },
      py::arg("backend"), py::arg("device") = 0, py::call_guard<Released>(),
      "How many bytes the buffers of a model may have on this device. None: as much as the host has.");
  m.def(
      "has_own_memory", [](const std::string& backend) { return !device_entry(backend).shares_memory; },
      py::arg("backend"), "Whether the device has memory of its own.");
  m.def("metal_shader", &metal::shader_text, py::arg("file"), "The text of a shader file as the driver gets it.");
  m.def("metal_shader_files", &metal::shader_files);
  m.def(
      "metal_facts",
      [] {
        const std::unique_ptr<metal::Device> device = metal::make_device();
        return std::make_pair(device->name(), device->facts());
      },
      "The name of the GPU, and facts about it as label and text. DeviceError when there is none.");
  m.def(
      "metal_compile",
      [](const std::string& file) {
        const std::unique_ptr<metal::Device> device = metal::make_device();
        return metal::Pipelines(*device).make_all(file);
      },
      py::arg("file"), py::call_guard<Released>(),
      "Compiles a shader file, makes every kernel ready, and returns how many there are.");
}

}  // namespace moeflux::python
