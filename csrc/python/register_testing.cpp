// What only tests do to the engine: another machine in place of this one, and what goes wrong. Engines and ops with
// faults are made where those without are.
#include <pybind11/stl.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/sha256.h"
#include "cuda/make_device.h"
#include "engine/engine.h"
#include "io/fault_injection.h"
#include "kernels/cpu/isa.h"
#include "metal/make_device.h"
#include "python/bindings.h"
#include "python/bytes_view.h"

namespace py = pybind11;

namespace moeflux::python {
namespace {

// A number 0 to 1 for each place of a text, as if drawn, and always the same.
double drawn(int64_t place) {
  auto bits = static_cast<uint64_t>(place) * 0x9E3779B97F4A7C15U;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9U;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBU;
  return static_cast<double>(bits >> 11) / 9007199254740992.0;
}

// Drafts of a text that is known, each of them right with this probability.
DraftSource drafts_of(std::vector<int32_t> text, double right) {
  return [text = std::move(text), right](std::span<const int32_t> before, int32_t, std::span<int32_t> drafts) {
    const size_t next = before.size() + 1;
    const size_t count = next < text.size() ? std::min(drafts.size(), text.size() - next) : 0;
    for (size_t i = 0; i < count; ++i) {
      const int32_t token = text[next + i];
      const bool is_right = drawn(static_cast<int64_t>(next + i)) < right;
      drafts[i] = is_right ? token : token == 0 ? 1 : token - 1;
    }
    return static_cast<int64_t>(count);
  };
}

}  // namespace

Class<Testing> register_testing(py::module_& m) {
  Class<Testing> testing(m, "testing",
                         "What only tests do: another machine in place of this one, and what goes wrong.");
  Class<EngineFaults>(
      testing, "Faults",
      "What goes wrong: the op, the copy outside of batches and the expert read that fail. And the device: one that "
      "works on a thread of its own (`deferred`), or one that has memory of its own as well (`apart`). And drafts of "
      "this `text`, each of them `right` with this probability, in place of those that the model would make.")
      .def(py::init([](int64_t fail_at_op, const std::shared_ptr<FaultPlan>& fault, bool deferred, bool apart,
                       int64_t fail_at_copy, std::vector<int32_t> text, double right) {
             auto faults =
                 std::make_unique<EngineFaults>(EngineFaults{.backend = {fail_at_op, deferred, apart, fail_at_copy}});
             if (fault) faults->open = faulty_readers(fault);
             if (!text.empty()) faults->drafts = drafts_of(std::move(text), right);
             return faults;
           }),
           py::kw_only(), py::arg("fail_at_op") = -1, py::arg("fault") = py::none(), py::arg("deferred") = false,
           py::arg("apart") = false, py::arg("fail_at_copy") = -1, py::arg("text") = std::vector<int32_t>(),
           py::arg("right") = 1.0);
  testing
      .def_static("missing_of_amx", &cpu::missing_of_amx,
                  "What this machine lacks for the kernels of AMX: nothing, `tiles`, or something else.")
      .def_static(
          "emulate_amx",
          [](uintptr_t int16, uintptr_t attention) {
            cpu::emulate_amx(reinterpret_cast<const cpu::Int16Kernels*>(int16),
                             reinterpret_cast<const cpu::AttentionKernels*>(attention));
          },
          py::arg("int16"), py::arg("attention"),
          "Adds `amx` with the kernels at these addresses, if only the tiles are missing. It must be called before "
          "anybody has asked for the instruction sets that there are.")
      .def_static(
          "set_metal_device",
          [](uintptr_t make, bool preferred, double max_work) {
            metal::set_make_device(reinterpret_cast<metal::MakeDevice>(make), preferred, max_work);
          },
          py::arg("make"), py::arg("preferred") = false, py::arg("max_work") = metal::default_work,
          "Sets a function that makes devices, by its address, or with 0 the machine's own.")
      .def_static("set_cuda_libraries", &cuda::set_own_libraries, py::arg("driver"), py::arg("compiler"),
                  "Opens other libraries in place of NVIDIA's driver and of NVRTC, or with empty names the machine's "
                  "own.")
      .def_static(
          "sha256",
          [](const std::vector<py::bytes>& parts) {
            Sha256 sum;
            for (const py::bytes& part : parts) sum.add(BytesView(part).bytes());
            return hex(sum.sum());
          },
          py::arg("parts"), "Of these bytes, one after the other.");
  return testing;
}

}  // namespace moeflux::python
