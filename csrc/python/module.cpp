// moeflux._core: the C++ side of the package. Users import `moeflux`, never this.
#include "moeflux.h"
#include "python/bindings.h"

PYBIND11_MODULE(_core, m, pybind11::mod_gil_not_used()) {
  m.doc() = "The C++ core of moeflux.";
  m.attr("__version__") = MOEFLUX_VERSION;
  m.attr("__commit__") = moeflux::commit;
  moeflux::python::register_errors();
  moeflux::python::register_quant_format(m);
  moeflux::python::register_quantize(m);
  moeflux::python::register_snapshot(m);
  moeflux::python::register_format(m);
  moeflux::python::register_gguf(m);
  moeflux::python::register_io(m);
  auto testing = moeflux::python::register_testing(m);
  moeflux::python::register_ops(m, testing);
  moeflux::python::register_metal(m);
  moeflux::python::register_cuda(m);
  moeflux::python::register_engine(m, testing);
  moeflux::python::register_sampling(m);
  moeflux::python::register_activations(m);
  moeflux::python::register_decoder(m);
  moeflux::python::register_ring(m);
  moeflux::python::register_probe(m);
  moeflux::python::register_trace(m);
}
