// One op at a time on NumPy arrays, for any backend: what tests and the curious call.
#include "python/ops.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "core/error.h"
#include "core/thread_pool.h"
#include "engine/engine.h"
#include "kernels/cpu/isa.h"

namespace moeflux::python {
namespace {

// ---- Vectors --------------------------------------------------------------------------------------------------------

py::object embed(const Ops& ops, const py::object& table, const Array& ids) {
  OpArguments a = ops.arguments("embed");
  const Matrix matrix = a.matrix("table", table);
  const View rows = a.ints("ids", ids, {-1});
  const int64_t n = ids.shape(0);
  for (int64_t i = 0; i < n; ++i)
    a.require(a.values<int32_t>(rows)[i] >= 0 && a.values<int32_t>(rows)[i] < matrix.rows, "ids",
              concat("0 to ", matrix.rows - 1), a.values<int32_t>(rows)[i]);
  const View out = a.output(n * matrix.columns);
  a.run([&](Commands& commands) { commands.embed(matrix, rows, out, n); });
  return a.floats_of(out, {n, matrix.columns});
}

py::object rms_norm(const Ops& ops, const Array& x, const Array& weight, float eps) {
  OpArguments a = ops.arguments("rms_norm");
  const View rows = a.floats("x", x, {-1, -1});
  const int64_t n = x.shape(0);
  const int64_t width = x.shape(1);
  const View factors = a.floats("weight", weight, {width});
  const View out = a.output(n * width);
  a.run([&](Commands& commands) { commands.rms_norm(rows, factors, out, n, width, eps); });
  return a.floats_of(out, {n, width});
}

py::object rms_norm_heads(const Ops& ops, const Array& x, const py::object& weight, float eps, float scale) {
  OpArguments a = ops.arguments("rms_norm_heads");
  const Heads heads = a.heads("x", x, {-1, -1, -1});
  const View factors = a.maybe_floats("weight", weight, {heads.dim});
  const int64_t n = x.shape(0);
  a.run([&](Commands& commands) { commands.rms_norm_heads(heads, factors, n, eps, scale); });
  return a.numbers(heads, n);
}

py::object layer_norm(const Ops& ops, const Array& x, const Array& weight, const Array& bias, float eps) {
  OpArguments a = ops.arguments("layer_norm");
  const View rows = a.floats("x", x, {-1, -1});
  const int64_t n = x.shape(0);
  const int64_t width = x.shape(1);
  const View factors = a.floats("weight", weight, {width});
  const View added = a.floats("bias", bias, {width});
  a.run([&](Commands& commands) { commands.layer_norm(rows, factors, added, n, width, eps); });
  return a.floats_of(rows, {n, width});
}

py::object gated_rms_norm(const Ops& ops, const Array& x, const Array& z, const Array& weight, float eps) {
  OpArguments a = ops.arguments("gated_rms_norm");
  const Heads heads = a.heads("x", x, {-1, -1, -1});
  const int64_t n = x.shape(0);
  const Heads gates = a.heads("z", z, {n, heads.heads, heads.dim});
  const View factors = a.floats("weight", weight, {heads.dim});
  a.run([&](Commands& commands) { commands.gated_rms_norm(heads, gates, factors, n, eps); });
  return a.numbers(heads, n);
}

py::object rope(const Ops& ops, const Array& x, const Array& angles, bool interleaved) {
  OpArguments a = ops.arguments("rope");
  const Heads heads = a.heads("x", x, {-1, -1, -1});
  const int64_t n = x.shape(0);
  const View turns = a.floats("angles", angles, {n, -1, 2});
  const int64_t half = angles.shape(1);
  a.require(2 * half <= heads.dim, "angles", concat("at most half of ", heads.dim, " channels"), half);
  a.run([&](Commands& commands) { commands.rope(heads, turns, half, interleaved, n); });
  return a.numbers(heads, n);
}

py::object append(const Ops& ops, const Array& x, const Array& cache, int64_t first) {
  OpArguments a = ops.arguments("append");
  // Codes are [rows, heads, ...], each head with a scale.
  const bool codes = cache.ndim() == 3;
  a.check_rows("cache", cache, codes ? Shape{-1, -1, -1} : Shape{-1, -1});
  a.require(codes == (cache.itemsize() == 1), "cache", "three dimensions for int8 and two for others", cache.ndim());
  const Heads rows = a.heads("x", x, {-1, codes ? cache.shape(1) * (cache.shape(2) - 2) : cache.shape(1)});
  const int64_t n = x.shape(0);
  a.require(first >= 0 && first <= cache.shape(0) - n, "first", concat("room for ", n, " rows"), first);
  const Cache kept = a.in_blocks({cache}).front();
  a.run([&](Commands& commands) { commands.append(rows.view, rows.row_stride, kept, first, n); });
  return a.rows_of(kept, cache);
}

py::object swiglu(const Ops& ops, const Array& gate, const Array& up) {
  OpArguments a = ops.arguments("swiglu");
  const View gates = a.floats("gate", gate, {-1});
  const int64_t count = gate.shape(0);
  const View ups = a.floats("up", up, {count});
  a.run([&](Commands& commands) { commands.swiglu(gates, ups, gates, count); });
  return a.floats_of(gates, {count});
}

py::object geglu(const Ops& ops, const Array& gate, const Array& up) {
  OpArguments a = ops.arguments("geglu");
  const View gates = a.floats("gate", gate, {-1});
  const int64_t count = gate.shape(0);
  const View ups = a.floats("up", up, {count});
  a.run([&](Commands& commands) { commands.geglu(gates, ups, gates, count); });
  return a.floats_of(gates, {count});
}

py::object residual_add(const Ops& ops, const Array& x, const Array& y) {
  OpArguments a = ops.arguments("residual_add");
  const View xs = a.floats("x", x, {-1});
  const int64_t count = x.shape(0);
  const View ys = a.floats("y", y, {count});
  a.run([&](Commands& commands) { commands.residual_add(xs, ys, xs, count); });
  return a.floats_of(xs, {count});
}

py::object bias_add(const Ops& ops, const Array& x, const Array& bias) {
  OpArguments a = ops.arguments("bias_add");
  const View rows = a.floats("x", x, {-1, -1});
  const int64_t n = x.shape(0);
  const int64_t width = x.shape(1);
  const View added = a.floats("bias", bias, {width});
  a.run([&](Commands& commands) { commands.bias_add(rows, added, n, width); });
  return a.floats_of(rows, {n, width});
}

py::object scale(const Ops& ops, const Array& x, float factor) {
  OpArguments a = ops.arguments("scale");
  const View numbers = a.floats("x", x, {-1});
  const int64_t count = x.shape(0);
  a.run([&](Commands& commands) { commands.scale(numbers, factor, count); });
  return a.floats_of(numbers, {count});
}

py::object soft_cap(const Ops& ops, const Array& x, float cap) {
  OpArguments a = ops.arguments("soft_cap");
  const View numbers = a.floats("x", x, {-1});
  const int64_t count = x.shape(0);
  a.run([&](Commands& commands) { commands.soft_cap(numbers, cap, count); });
  return a.floats_of(numbers, {count});
}

py::object sigmoid_gate(const Ops& ops, const Array& x, const Array& gate) {
  OpArguments a = ops.arguments("sigmoid_gate");
  const Heads heads = a.heads("x", x, {-1, -1, -1});
  const int64_t n = x.shape(0);
  const Heads gates = a.heads("gate", gate, {n, heads.heads, heads.dim});
  a.run([&](Commands& commands) { commands.sigmoid_gate(heads, gates, n); });
  return a.numbers(heads, n);
}

py::object combine(const Ops& ops, const py::object& residual, const Array& outputs, const Array& weights,
                   const py::object& shared, const py::object& shared_gate) {
  OpArguments a = ops.arguments("combine");
  CombineArgs args;
  args.outputs = a.floats("outputs", outputs, {-1, -1, -1});
  const int64_t n = outputs.shape(0);
  args.hidden = outputs.shape(2);
  args.residual = a.maybe_floats("residual", residual, {n, args.hidden});
  args.k = outputs.shape(1);
  args.weights = a.floats("weights", weights, {n, args.k});
  args.shared = a.maybe_floats("shared", shared, {n, args.hidden});
  args.shared_gate = a.maybe_floats("shared_gate", shared_gate, {n});
  args.out = args.residual ? args.residual : a.output(n * args.hidden);
  a.run([&](Commands& commands) { commands.combine(args, n); });
  return a.floats_of(args.out, {n, args.hidden});
}

// ---- Products -------------------------------------------------------------------------------------------------------

// Each product is x, a matrix, and whether that is transposed.
py::list matmul(const Ops& ops, const std::vector<std::tuple<Array, py::object, bool>>& products) {
  OpArguments a = ops.arguments("matmul");
  std::vector<Product> recorded;
  std::vector<Heads> outs;
  int64_t n = -1;
  for (const auto& [x, stored, transposed] : products) {
    Product product;
    product.matrix = a.matrix("matrix", stored);
    product.transposed = transposed;
    const Heads rows = a.heads("x", x, {n, transposed ? product.matrix.rows : product.matrix.columns});
    n = x.shape(0);
    product.x = rows.view;
    product.x_stride = rows.row_stride;
    outs.push_back(a.heads_out(n, 1, transposed ? product.matrix.columns : product.matrix.rows));
    product.out = outs.back().view;
    product.out_stride = outs.back().row_stride;
    recorded.push_back(product);
  }
  a.run([&](Commands& commands) { commands.matmul(recorded, std::max<int64_t>(n, 0)); });
  py::list results;
  for (const Heads& out : outs) results.append(a.numbers(out, n, true));
  return results;
}

// ---- Choosing -------------------------------------------------------------------------------------------------------

// The arguments that both routers share. Without groups, both numbers of them are 0.
RouteArgs route_args(OpArguments& a, const Array& logits, int64_t k, int64_t groups, int64_t groups_kept,
                     bool normalize, float scaling) {
  RouteArgs args;
  args.logits = a.floats("logits", logits, {-1, -1});
  args.experts = logits.shape(1);
  a.require(k >= 1 && k <= args.experts, "k", concat("1 to ", args.experts), k);
  if (groups || groups_kept) {
    a.require(groups >= 1 && args.experts % groups == 0, "groups", concat("a divisor of ", args.experts), groups);
    a.require(groups_kept >= 1 && groups_kept <= groups, "groups_kept", concat("1 to ", groups), groups_kept);
    a.require(k <= args.experts / groups * groups_kept, "k", "no more than the groups kept have", k);
    a.require(args.experts <= 4096, "logits", "at most 4096 experts", args.experts);
  }
  args.k = k;
  args.groups = groups;
  args.groups_kept = groups_kept;
  args.normalize = normalize;
  args.scaling = scaling;
  args.ids = a.output(logits.shape(0) * k);
  args.weights = a.output(logits.shape(0) * k);
  return args;
}

py::tuple route_softmax(const Ops& ops, const Array& logits, int64_t k, int64_t groups, int64_t groups_kept,
                        bool normalize, float scaling, const py::object& factors) {
  OpArguments a = ops.arguments("route_softmax");
  RouteArgs args = route_args(a, logits, k, groups, groups_kept, normalize, scaling);
  args.factors = a.maybe_floats("factors", factors, {args.experts});
  const int64_t n = logits.shape(0);
  a.run([&](Commands& commands) { commands.route_softmax(args, n); });
  return py::make_tuple(a.ints_of(args.ids, {n, k}), a.floats_of(args.weights, {n, k}));
}

py::tuple route_grouped(const Ops& ops, const Array& logits, const Array& bias, int64_t k, int64_t groups,
                        int64_t groups_kept, bool normalize, float scaling) {
  OpArguments a = ops.arguments("route_grouped");
  a.require(groups >= 1, "groups", "at least 1", groups);
  RouteArgs args = route_args(a, logits, k, groups, groups_kept, normalize, scaling);
  const int64_t n = logits.shape(0);
  args.bias = a.floats("bias", bias, {args.experts});
  a.run([&](Commands& commands) { commands.route_grouped(args, n); });
  return py::make_tuple(a.ints_of(args.ids, {n, k}), a.floats_of(args.weights, {n, k}));
}

// ---- Batches --------------------------------------------------------------------------------------------------------

// x doubled `count` times by ops of one batch, then how many of two waits threw an error, and the text of the last.
py::tuple doubled(const Ops& ops, const Array& x, int64_t count) {
  OpArguments a = ops.arguments("doubled");
  const View numbers = a.floats("x", x, {-1});
  const int64_t size = x.shape(0);
  int errors = 0;
  std::string text;
  {
    const Released release;
    std::unique_ptr<Commands> commands = ops.backend->begin();
    a.upload(*commands);
    for (int64_t i = 0; i < count; ++i) commands->residual_add(numbers, numbers, numbers, size);
    a.download(*commands);
    Ticket ticket = ops.backend->submit(std::move(commands));
    for (int i = 0; i < 2; ++i) {
      try {
        ticket.wait();
      } catch (const Error& error) {
        ++errors;
        text = error.what();
      }
    }
  }
  return py::make_tuple(a.floats_of(numbers, {size}), errors, text);
}

// How often each unit ran. The unit `fail_at` throws. `in_steps`: begun, and finished a little later.
std::vector<int> run_units(ThreadPool& pool, int64_t units, int64_t fail_at, bool in_steps) {
  std::vector<int> runs(static_cast<size_t>(std::max<int64_t>(units, 0)));
  const Released release;
  const auto run = [&](int64_t unit) {
    if (unit == fail_at) throw StateError(concat("unit ", unit, " was told to fail"));
    ++runs[static_cast<size_t>(unit)];
  };
  if (!in_steps) {
    pool.parallel(units, run);
    return runs;
  }
  pool.begin(units, run);
  std::this_thread::yield();
  pool.finish();
  return runs;
}

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const cpu::Isa& isa : cpu::available_isas()) names.push_back(isa.name);
  return names;
}

void register_op_time(py::module_& m) {
  Class<OpTime>(m, "OpTime", "What the ops of one kind took together. See core/op_time.h.")
      .def_readonly("op", &OpTime::op)
      .def_readonly("shape", &OpTime::shape)
      .def_readonly("calls", &OpTime::calls)
      .def_readonly("rows", &OpTime::rows)
      .def_readonly("seconds", &OpTime::seconds)
      .def_readonly("bytes", &OpTime::bytes)
      .def_readonly("products", &OpTime::products);
}

std::unique_ptr<Ops> make_ops(const EngineFaults& faults, const std::string& backend, const std::string& isa,
                              int threads, bool timed, bool exact) {
  Ops made = {std::make_unique<OpTimes>(), make_backend(backend, {isa, exact, threads}, faults.backend)};
  if (timed) made.backend = std::make_unique<TimedBackend>(std::move(made.backend), *made.times);
  return std::make_unique<Ops>(std::move(made));
}

}  // namespace

void register_ops(py::module_& m, Class<Testing>& testing) {
  register_op_time(m);
  m.def("isas", &isa_names, "The instruction sets whose kernels run here, the best first.");

  Class<ThreadPool>(m, "ThreadPool", "For tests: the threads that ops are divided over.")
      .def(constructor<ThreadPool, int>(), py::arg("threads"))
      .def_property_readonly("threads", &ThreadPool::threads)
      .def("run", &run_units, py::arg("units"), py::arg("fail_at") = -1, py::arg("in_steps") = false,
           "Runs the units, and returns how often each ran. In steps: begun first, and finished then.");

  Class<Ops> ops(m, "Ops", "The ops of a backend, one at a time. See moeflux.ops.Ops.");
  const auto define = [&](auto&&... arguments) {
    ops.def(py::init(without_faults(&make_ops)), arguments...);
    testing.def_static("ops", &make_ops, py::arg("faults"), arguments..., "Like Ops, but with these faults.");
  };
  define(py::arg("backend") = "cpu", py::arg("isa") = "", py::arg("threads") = 0, py::arg("timed") = false,
         py::arg("exact") = false);
  ops.def("describe", [](const Ops& self) { return self.backend->describe(); })
      .def_property_readonly(
          "isa", [](const Ops& self) { return self.backend->isa(); },
          "The instruction set of the CPU kernels; empty where none run.")
      .def(
          "take_times", [](const Ops& self) { return self.times->take(); },
          "The times of each kind of op since the last call.")
      .def("embed", &embed, py::arg("table"), py::arg("ids"))
      .def("rms_norm", &rms_norm, py::arg("x"), py::arg("weight"), py::arg("eps"))
      .def("rms_norm_heads", &rms_norm_heads, py::arg("x"), py::arg("weight"), py::arg("eps"), py::arg("scale"))
      .def("layer_norm", &layer_norm, py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("eps"))
      .def("gated_rms_norm", &gated_rms_norm, py::arg("x"), py::arg("z"), py::arg("weight"), py::arg("eps"))
      .def("rope", &rope, py::arg("x"), py::arg("angles"), py::arg("interleaved"))
      .def("append", &append, py::arg("x"), py::arg("cache"), py::arg("first"))
      .def("swiglu", &swiglu, py::arg("gate"), py::arg("up"))
      .def("geglu", &geglu, py::arg("gate"), py::arg("up"))
      .def("residual_add", &residual_add, py::arg("x"), py::arg("y"))
      .def("bias_add", &bias_add, py::arg("x"), py::arg("bias"))
      .def("scale", &scale, py::arg("x"), py::arg("factor"))
      .def("soft_cap", &soft_cap, py::arg("x"), py::arg("cap"))
      .def("sigmoid_gate", &sigmoid_gate, py::arg("x"), py::arg("gate"))
      .def("combine", &combine, py::arg("residual"), py::arg("outputs"), py::arg("weights"), py::arg("shared"),
           py::arg("shared_gate"))
      .def("matmul", &matmul, py::arg("products"))
      .def("route_softmax", &route_softmax, py::arg("logits"), py::arg("k"), py::arg("groups"), py::arg("groups_kept"),
           py::arg("normalize"), py::arg("scaling"), py::arg("factors") = py::none())
      .def("route_grouped", &route_grouped, py::arg("logits"), py::arg("bias"), py::arg("k"), py::arg("groups"),
           py::arg("groups_kept"), py::arg("normalize"), py::arg("scaling"))
      .def("doubled", &doubled, py::arg("x"), py::arg("count"),
           "x doubled `count` times in one batch, how many of two waits threw an error, and the text of the last "
           "error.");
  register_expert_ops(ops);
  register_mixer_ops(ops);
  register_selection_ops(ops);
  register_hyper_ops(ops);
  register_choosing_ops(ops);
}

}  // namespace moeflux::python
