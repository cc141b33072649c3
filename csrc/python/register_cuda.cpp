// What Python sees of CUDA: whether it works, its facts, its kernels.
#include <pybind11/stl.h>

#include "cuda/device.h"
#include "cuda/kernels.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace moeflux::python {

void register_cuda(py::module_& m) {
  // NVIDIA's compiler comes as a package. Where packages lie does not change later.
  std::vector<std::string> folders;
  for (const py::handle folder : py::module_::import("sys").attr("path"))
    if (py::isinstance<py::str>(folder)) folders.push_back(folder.cast<std::string>());
  cuda::set_package_folders(std::move(folders));

  m.def("cuda_kernel_files", &cuda::kernel_files);
  m.def("cuda_kernel_text", &cuda::kernel_text, py::arg("file"),
        "The text of a file of kernels as the compiler gets it.");
  m.def(
      "cuda_facts",
      [] {
        const std::shared_ptr<cuda::Device> device = cuda::Device::open();
        std::vector<std::pair<std::string, std::string>> facts = device->facts();
        const cuda::Compiler* compiler = cuda::compiler();
        facts.emplace_back("NVRTC", compiler ? compiler->version() : "absent");
        return std::make_pair(device->chip().name, facts);
      },
      py::call_guard<Released>(),
      "The name of the GPU, and facts about it as label and text. DeviceError when there is none.");
  m.def(
      "cuda_compile",
      [](const std::string& file, const std::string& architecture, const std::vector<std::string>& options) {
        cuda::Compiled made;
        {
          const Released release;
          const cuda::Compiler* compiler = cuda::compiler();
          if (!compiler) throw DeviceError("cuda: expected NVRTC, found none: pip install \"moeflux[cuda]\"");
          made = cuda::compile(*compiler, file, cuda::kernel_text(file), architecture, options);
        }
        return std::make_pair(py::bytes(made.cubin), made.said);
      },
      py::arg("file"), py::arg("architecture"), py::arg("options") = std::vector<std::string>(),
      "What NVRTC makes of a file of kernels for an architecture such as `sm_90a`, and what it says about it. It needs "
      "neither GPU nor driver.");
  m.def(
      "cuda_files_to_compile",
      []() -> std::vector<std::string> {
        try {
          return cuda::files_to_compile(cuda::Device::open()->chip());
        } catch (const DeviceError&) {
          return {};
        }
      },
      py::call_guard<Released>(),
      "Files of kernels that are not yet compiled for the GPU of this machine. None if there is no GPU, or nobody to "
      "compile them.");
  m.def(
      "cuda_compile_for_device", [](const std::string& file) { cuda::cubin_of(file, cuda::Device::open()->chip()); },
      py::arg("file"), py::call_guard<Released>(),
      "Compiles a file of kernels for the GPU of this machine, and keeps what comes of it.");
}

}  // namespace moeflux::python
