// The ops that mixers are made of, for register_ops.cpp: attention, and the pieces of the delta-net.
#include "core/error.h"
#include "metal/attention_steps.h"
#include "python/ops.h"

namespace moeflux::python {
namespace {

py::object attention(const Ops& ops, const Array& q, const Array& k, const Array& v, float scale,
                     const py::object& sinks, int64_t window) {
  OpArguments a = ops.arguments("attention");
  AttentionArgs args;
  args.q = a.heads("q", q, {-1, -1, -1});
  a.check_rows("k", k, {-1, -1, args.q.dim});
  const int64_t n = q.shape(0);
  const int64_t rows = k.shape(0);
  a.require_numbers("q", q);
  args.kv_heads = k.shape(1);
  a.require_groups("k", args.q.heads, args.kv_heads);
  a.require(rows >= n, "k", concat("at least ", n, " rows"), rows);
  a.check_rows("v", v, {rows, args.kv_heads, args.q.dim});
  a.require(v.itemsize() == k.itemsize(), "v", "the type of k, in bytes", v.itemsize());
  const std::vector<Cache> kept = a.in_blocks({k, v});
  args.k = kept[0];
  args.v = kept[1];
  args.first_position = rows - n;
  args.scale = scale;
  args.sinks = a.maybe_floats("sinks", sinks, {args.q.heads});
  a.require(window >= 0, "window", "0 or a number of rows", window);
  args.window = window;
  args.out = a.output(n * args.q.heads * args.q.dim);
  a.run([&](Commands& commands) { commands.attention(args, n); });
  return a.floats_of(args.out, {n, args.q.heads, args.q.dim});
}

// One query in the steps of the older engine. The scores are [1, heads, rows].
py::object attention_scores(const Ops& ops, const Array& q, const Array& k, float scale) {
  OpArguments a = ops.arguments("attention_scores");
  metal::AttentionSteps args;
  args.q = a.floats("q", q, {-1, -1});
  args.dim = q.shape(1);
  args.k = a.floats("k", k, {-1, -1, args.dim});
  a.require_numbers("q", q);
  args.kv_heads = k.shape(1);
  a.require_groups("k", q.shape(0), args.kv_heads);
  a.require_numbers("k", k);
  args.scale = scale;
  args.scores = a.heads_out(1, q.shape(0), k.shape(0));
  a.run([&](Commands& commands) { metal::attention_scores(commands, args); });
  return a.numbers(args.scores, 1);
}

py::object attention_softmax(const Ops& ops, const Array& scores) {
  OpArguments a = ops.arguments("attention_softmax");
  metal::AttentionSteps args;
  args.scores = a.heads("scores", scores, {1, -1, -1});
  a.require_numbers("scores", scores);
  a.run([&](Commands& commands) { metal::attention_softmax(commands, args); });
  return a.numbers(args.scores, 1);
}

py::object attention_values(const Ops& ops, const Array& scores, const Array& v) {
  OpArguments a = ops.arguments("attention_values");
  metal::AttentionSteps args;
  args.scores = a.heads("scores", scores, {1, -1, -1});
  args.v = a.floats("v", v, {args.scores.dim, -1, -1});
  a.require_numbers("scores", scores);
  args.kv_heads = v.shape(1);
  a.require_groups("v", args.scores.heads, args.kv_heads);
  a.require_numbers("v", v);
  args.dim = v.shape(2);
  args.out = a.output(args.scores.heads * args.dim);
  a.run([&](Commands& commands) { metal::attention_values(commands, args); });
  return a.floats_of(args.out, {args.scores.heads, args.dim});
}

py::object mla_attention(const Ops& ops, const Array& q_latent, const Array& q_pe, const Array& latent,
                         const Array& k_pe, float scale) {
  OpArguments a = ops.arguments("mla_attention");
  LatentAttentionArgs args;
  args.q_latent = a.heads("q_latent", q_latent, {-1, -1, -1});
  const int64_t n = q_latent.shape(0);
  args.q_pe = a.heads("q_pe", q_pe, {n, args.q_latent.heads, -1});
  a.require_numbers("q_latent", q_latent);
  a.require_numbers("q_pe", q_pe);
  a.check_rows("latent", latent, {-1, args.q_latent.dim});
  const int64_t rows = latent.shape(0);
  a.check_rows("k_pe", k_pe, {rows, args.q_pe.dim});
  a.require(rows >= n, "latent", concat("at least ", n, " rows"), rows);
  a.require(k_pe.itemsize() == latent.itemsize(), "k_pe", "the type of latent, in bytes", k_pe.itemsize());
  const std::vector<Cache> kept = a.in_blocks({latent, k_pe});
  args.latent = kept[0];
  args.k_pe = kept[1];
  args.first_position = rows - n;
  args.scale = scale;
  args.out = a.output(n * args.q_latent.heads * args.q_latent.dim);
  a.run([&](Commands& commands) { commands.mla_attention(args, n); });
  return a.floats_of(args.out, {n, args.q_latent.heads, args.q_latent.dim});
}

py::tuple conv1d(const Ops& ops, const Array& x, const Array& state, const Array& weight, int64_t dilation) {
  OpArguments a = ops.arguments("conv1d");
  ConvArgs args;
  a.require(dilation >= 1, "dilation", "at least 1", dilation);
  args.dilation = dilation;
  args.x = a.floats("x", x, {-1, -1});
  const int64_t n = x.shape(0);
  args.channels = x.shape(1);
  args.weight = a.floats("weight", weight, {args.channels, -1});
  args.taps = weight.shape(1);
  a.require(args.taps >= 1, "weight", "at least 1 tap", args.taps);
  args.state = a.floats("state", state, {args.kept(), args.channels});
  args.out = a.output(n * args.channels);
  a.run([&](Commands& commands) { commands.conv1d(args, n); });
  return py::make_tuple(a.floats_of(args.out, {n, args.channels}),
                        a.floats_of(args.state, {args.kept(), args.channels}));
}

py::tuple delta_gates(const Ops& ops, const Array& alpha, const Array& b, const Array& a_log, const Array& dt_bias) {
  OpArguments a = ops.arguments("delta_gates");
  DeltaGatesArgs args;
  args.alpha = a.floats("alpha", alpha, {-1, -1});
  const int64_t n = alpha.shape(0);
  args.heads = alpha.shape(1);
  args.b = a.floats("b", b, {n, args.heads});
  args.a_log = a.floats("a_log", a_log, {args.heads});
  args.dt_bias = a.floats("dt_bias", dt_bias, {args.heads});
  args.decay = a.output(n * args.heads);
  args.beta = a.output(n * args.heads);
  a.run([&](Commands& commands) { commands.delta_gates(args, n); });
  return py::make_tuple(a.floats_of(args.decay, {n, args.heads}), a.floats_of(args.beta, {n, args.heads}));
}

py::tuple gated_delta(const Ops& ops, const Array& q, const Array& k, const Array& v, const Array& decay,
                      const Array& beta, const Array& state, bool tiled) {
  OpArguments a = ops.arguments("gated_delta");
  DeltaArgs args;
  args.tiled = tiled;
  args.q = a.heads("q", q, {-1, -1, -1});
  const int64_t n = q.shape(0);
  args.k = a.heads("k", k, {n, args.q.heads, args.q.dim});
  args.v = a.heads("v", v, {n, -1, -1});
  a.require(args.k.heads > 0 && args.v.heads % args.k.heads == 0, "v", concat("a multiple of ", args.k.heads, " heads"),
            args.v.heads);
  args.decay = a.floats("decay", decay, {n, args.v.heads});
  args.beta = a.floats("beta", beta, {n, args.v.heads});
  const Shape shape = {args.v.heads, args.v.dim, args.k.dim};
  args.state = a.floats("state", state, shape);
  args.out = a.output(n * args.v.heads * args.v.dim);
  a.run([&](Commands& commands) { commands.gated_delta(args, n); });
  return py::make_tuple(a.floats_of(args.out, {n, args.v.heads, args.v.dim}), a.floats_of(args.state, shape));
}

}  // namespace

void register_mixer_ops(Class<Ops>& ops) {
  ops.def("attention", &attention, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("scale"),
          py::arg("sinks") = py::none(), py::arg("window") = 0)
      .def("attention_scores", &attention_scores, py::arg("q"), py::arg("k"), py::arg("scale"))
      .def("attention_softmax", &attention_softmax, py::arg("scores"))
      .def("attention_values", &attention_values, py::arg("scores"), py::arg("v"))
      .def("mla_attention", &mla_attention, py::arg("q_latent"), py::arg("q_pe"), py::arg("latent"), py::arg("k_pe"),
           py::arg("scale"))
      .def("conv1d", &conv1d, py::arg("x"), py::arg("state"), py::arg("weight"), py::arg("dilation") = 1)
      .def("delta_gates", &delta_gates, py::arg("alpha"), py::arg("b"), py::arg("a_log"), py::arg("dt_bias"))
      .def("gated_delta", &gated_delta, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("decay"), py::arg("beta"),
           py::arg("state"), py::arg("tiled") = false);
}

}  // namespace moeflux::python
