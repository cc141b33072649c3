// The ops of residual streams, and the gate of n-gram embeddings, for register_ops.cpp.
#include "core/error.h"
#include "python/ops.h"

namespace moeflux::python {
namespace {

py::object silu(const Ops& ops, const Array& x, float factor) {
  OpArguments a = ops.arguments("silu");
  const View numbers = a.floats("x", x, {-1});
  const int64_t count = x.shape(0);
  a.run([&](Commands& commands) { commands.silu(numbers, factor, count); });
  return a.floats_of(numbers, {count});
}

py::object hyper_norm(const Ops& ops, const Array& x, const Array& weight, float eps) {
  OpArguments a = ops.arguments("hyper_norm");
  const View rows = a.floats("x", x, {-1, -1, -1});
  const int64_t n = x.shape(0);
  const int64_t streams = x.shape(1);
  const int64_t width = x.shape(2);
  const View factors = a.floats("weight", weight, {streams, width});
  const View out = a.output(n * streams * width);
  a.run([&](Commands& commands) { commands.hyper_norm(rows, factors, out, n, streams, width, eps); });
  return a.floats_of(out, {n, streams, width});
}

py::object hyper_mix(const Ops& ops, const Array& normed, const Array& gates) {
  OpArguments a = ops.arguments("hyper_mix");
  HyperMixArgs args;
  args.normed = a.floats("normed", normed, {-1, -1, -1});
  a.require_numbers("normed", normed);
  const int64_t n = normed.shape(0);
  args.streams = normed.shape(1);
  args.width = normed.shape(2);
  args.gates = a.floats("gates", gates, {n, args.streams, args.width});
  args.out = a.output(n * args.width);
  a.run([&](Commands& commands) { commands.hyper_mix(args, n); });
  return a.floats_of(args.out, {n, args.width});
}

py::object hyper_add(const Ops& ops, const Array& x, const Array& y, const Array& gates) {
  OpArguments a = ops.arguments("hyper_add");
  HyperAddArgs args;
  args.x = a.floats("x", x, {-1, -1, -1});
  a.require_numbers("x", x);
  const int64_t n = x.shape(0);
  args.streams = x.shape(1);
  args.width = x.shape(2);
  args.y = a.floats("y", y, {n, args.width});
  args.gates = a.floats("gates", gates, {n, args.streams});
  a.run([&](Commands& commands) { commands.hyper_add(args, n); });
  return a.floats_of(args.x, {n, args.streams, args.width});
}

py::object ngram_gate(const Ops& ops, const Array& key, const Array& query, const Array& value) {
  OpArguments a = ops.arguments("ngram_gate");
  NgramGateArgs args;
  args.key = a.floats("key", key, {-1, -1, -1});
  a.require_numbers("key", key);
  const int64_t n = key.shape(0);
  args.streams = key.shape(1);
  args.width = key.shape(2);
  args.query = a.floats("query", query, {n, args.streams, args.width});
  args.value = a.floats("value", value, {n, args.width});
  args.out = a.output(n * args.streams * args.width);
  a.run([&](Commands& commands) { commands.ngram_gate(args, n); });
  return a.floats_of(args.out, {n, args.streams, args.width});
}

}  // namespace

void register_hyper_ops(Class<Ops>& ops) {
  ops.def("silu", &silu, py::arg("x"), py::arg("factor"))
      .def("hyper_norm", &hyper_norm, py::arg("x"), py::arg("weight"), py::arg("eps"))
      .def("hyper_mix", &hyper_mix, py::arg("normed"), py::arg("gates"))
      .def("hyper_add", &hyper_add, py::arg("x"), py::arg("y"), py::arg("gates"))
      .def("ngram_gate", &ngram_gate, py::arg("key"), py::arg("query"), py::arg("value"));
}

}  // namespace moeflux::python
