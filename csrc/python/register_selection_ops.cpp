// The ops of attention to selected rows, for register_ops.cpp.
#include <algorithm>
#include <limits>

#include "core/error.h"
#include "python/ops.h"

namespace moeflux::python {
namespace {

void require_unit(const OpArguments& a, int64_t unit) {
  a.require(unit >= 1 && block_rows % unit == 0, "unit", concat("a divisor of ", block_rows), unit);
}

// Scores that nobody makes are minus infinity.
py::object index_scores(const Ops& ops, const Array& q, const Array& keys, const py::object& weights, float scale,
                        int64_t first_position, int64_t unit) {
  OpArguments a = ops.arguments("index_scores");
  IndexScoresArgs args;
  args.q = a.heads("q", q, {-1, -1, -1});
  const int64_t n = q.shape(0);
  a.require_numbers("q", q);
  a.require(first_position >= 0, "first_position", "0 or more", first_position);
  require_unit(a, unit);
  a.check_rows("keys", keys, {-1, args.q.dim});
  const int64_t seen = units_seen(first_position + n - 1, unit);
  a.require(keys.shape(0) >= seen, "keys", concat("at least ", seen, " rows"), keys.shape(0));
  args.weights = a.maybe_floats("weights", weights, {n, args.q.heads});
  args.scale = scale;
  args.keys = a.in_blocks({keys}, unit).front();
  args.first_position = first_position;
  args.stride = keys.shape(0);
  args.scores = a.output(n * args.stride);
  std::fill_n(a.values<float>(args.scores), n * args.stride, -std::numeric_limits<float>::infinity());
  a.run([&](Commands& commands) { commands.index_scores(args, n); });
  return a.floats_of(args.scores, {n, args.stride});
}

// Rows that select nothing are -1.
py::object index_select(const Ops& ops, const Array& scores, int64_t count, int64_t first_position, int64_t unit) {
  OpArguments a = ops.arguments("index_select");
  IndexSelectArgs args;
  args.scores = a.floats("scores", scores, {-1, -1});
  const int64_t n = scores.shape(0);
  args.stride = scores.shape(1);
  a.require(first_position >= 0, "first_position", "0 or more", first_position);
  require_unit(a, unit);
  a.require(count >= 1, "count", "1 or more", count);
  const int64_t seen = units_seen(first_position + n - 1, unit);
  a.require(args.stride >= seen, "scores", concat("at least ", seen, " in a row"), args.stride);
  args.first_position = first_position;
  args.unit = unit;
  args.count = count;
  args.ids = a.output(n * count);
  std::fill_n(a.values<int32_t>(args.ids), n * count, -1);
  a.run([&](Commands& commands) { commands.index_select(args, n); });
  return a.ints_of(args.ids, {n, count});
}

py::object gather_rows(const Ops& ops, const py::array& rows, const Array& ids, int64_t position, int64_t unit) {
  OpArguments a = ops.arguments("gather_rows");
  GatherRowsArgs args;
  require_unit(a, unit);
  a.check_rows("rows", rows, rows.ndim() == 3 ? Shape{-1, -1, -1} : Shape{-1, -1});
  args.ids = a.ints("ids", ids, {-1});
  args.unit = unit;
  args.count = ids.shape(0);
  args.position = position;
  const int64_t seen = units_seen(position, unit);
  a.require(position >= 0 && rows.shape(0) > position, "position", concat("0 to ", rows.shape(0) - 1), position);
  a.require(args.count <= seen, "ids", concat("at most ", seen), args.count);
  for (int64_t i = 0; i < args.count; ++i) {
    const int32_t id = a.values<int32_t>(args.ids)[i];
    a.require(id >= 0 && id < seen, "ids", concat("0 to ", seen - 1), id);
  }
  args.from = a.in_blocks({rows}).front();
  std::vector<py::ssize_t> shape(rows.shape(), rows.shape() + rows.ndim());
  shape[0] = selected_rows(position, unit, args.count);
  const py::array gathered(rows.dtype(), shape);
  std::memset(const_cast<void*>(gathered.data()), 0, static_cast<size_t>(gathered.nbytes()));
  args.to = a.in_blocks({gathered}).front();
  a.run([&](Commands& commands) { commands.gather_rows(args); });
  return a.rows_of(args.to, gathered);
}

}  // namespace

void register_selection_ops(Class<Ops>& ops) {
  ops.def("index_scores", &index_scores, py::arg("q"), py::arg("keys"), py::arg("weights"), py::arg("scale"),
          py::arg("first_position"), py::arg("unit"))
      .def("index_select", &index_select, py::arg("scores"), py::arg("count"), py::arg("first_position"),
           py::arg("unit"))
      .def("gather_rows", &gather_rows, py::arg("rows"), py::arg("ids"), py::arg("position"), py::arg("unit"));
}

}  // namespace moeflux::python
