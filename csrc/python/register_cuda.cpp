// What Python sees of CUDA: whether it works, its facts, its kernels.
#include <pybind11/stl.h>

#include <map>

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

  m.def(
      "cuda_kernel_files",
      [] {
        std::map<std::string, std::vector<std::string>> files;
        for (const cuda::KernelFile& file : cuda::kernel_files()) files[file.name] = file.kernels;
        return files;
      },
      "The files of kernels, and the kernels in each.");
  m.def(
      "cuda_units",
      [](const std::string& file) {
        std::vector<std::string> names;
        for (const cuda::KernelFile& each : cuda::kernel_files())
          if (each.name == file)
            for (const cuda::Unit& unit : cuda::units_of(each)) names.push_back(unit.name());
        return names;
      },
      py::arg("file"), "What of a file is compiled at a time for a model: the file, or each of its kernels.");
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
  m.def("cuda_names", &cuda::Device::names, py::call_guard<Released>(),
        "The names of the GPUs that the driver shows, in the order of their numbers. DeviceError when there is none.");
  m.def(
      "cuda_compile",
      [](const std::string& name, const std::string& architecture, const std::vector<std::string>& options) {
        cuda::Compiled made;
        {
          const Released release;
          const cuda::Compiler* compiler = cuda::compiler();
          if (!compiler) throw DeviceError("cuda: expected NVRTC, found none: pip install \"moeflux[cuda]\"");
          const cuda::Unit unit = cuda::unit_of(name);
          made = cuda::compile(*compiler, unit, cuda::kernel_text(unit.file), architecture, options);
        }
        return std::make_pair(py::bytes(made.cubin), made.said);
      },
      py::arg("name"), py::arg("architecture"), py::arg("options") = std::vector<std::string>(),
      "What NVRTC makes of a kernel, or of all of a file, for an architecture such as `sm_90a`, and what it says about "
      "it. It needs neither GPU nor driver.");
  m.def(
      "cuda_to_compile",
      [](const std::vector<std::string>& units) -> std::vector<std::string> {
        try {
          return cuda::to_compile(units, cuda::Device::open()->chip());
        } catch (const DeviceError&) {
          return {};
        }
      },
      py::arg("units"), py::call_guard<Released>(),
      "Of these units, those that are not yet compiled for the GPU of this machine. None if there is no GPU, or nobody "
      "to compile them.");
  m.def(
      "cuda_make", [](const std::string& unit) { cuda::cubin_of(cuda::unit_of(unit), cuda::Device::open()->chip()); },
      py::arg("unit"), py::call_guard<Released>(),
      "Compiles a unit for the GPU of this machine, and keeps what comes of it.");
}

}  // namespace moeflux::python
