// The ops that find something in logits, for register_ops.cpp.
#include <tuple>
#include <vector>

#include "core/shortlist.h"
#include "python/ops.h"

namespace moeflux::python {
namespace {

py::tuple top_k(const Ops& ops, const Array& logits, int64_t k) {
  OpArguments a = ops.arguments("top_k");
  const View numbers = a.floats("logits", logits, {-1});
  const int64_t count = logits.shape(0);
  a.require(k >= 1 && k <= count, "k", concat("1 to ", count), k);
  const View ids = a.output(k);
  const View values = a.output(k);
  a.run([&](Commands& commands) { commands.top_k(numbers, count, k, ids, values); });
  return py::make_tuple(a.ints_of(ids, {k}), a.floats_of(values, {k}));
}

using Listed =
    std::tuple<int32_t, int32_t, py::array_t<double>, py::array_t<float>, py::array_t<int32_t>, py::array_t<float>>;

// Of each row: the likeliest, the first that is not finite, what blocks of it weigh and their greatest, and the list.
std::vector<Listed> shortlist(const Ops& ops, const Array& logits, double factor) {
  OpArguments a = ops.arguments("shortlist");
  const View numbers = a.floats("logits", logits, {-1, -1});
  const int64_t n = logits.shape(0);
  const int64_t count = logits.shape(1);
  a.require(count >= 1, "logits", "at least one column", count);
  const ShortlistLayout layout(count);
  std::vector<ShortlistArgs> rows;
  for (int64_t i = 0; i < n; ++i)
    rows.push_back({numbers.at(i * count), a.output(sizeof(ShortlistHead) / 4), a.output(layout.bytes() / 4), factor});
  a.run([&](Commands& commands) { commands.shortlist(rows, count); });
  std::vector<Listed> found;
  for (const ShortlistArgs& row : rows) {
    const auto* const head = a.values<ShortlistHead>(row.head);
    const auto* const blocks = a.values<ShortlistBlock>(row.list);
    py::array_t<double> sums(layout.blocks);
    py::array_t<float> greatests(layout.blocks);
    for (int64_t i = 0; i < layout.blocks; ++i) {
      sums.mutable_at(i) = blocks[i].sum;
      greatests.mutable_at(i) = blocks[i].greatest;
    }
    const View list = row.list;
    found.push_back(Listed(head->likeliest, head->odd, sums, greatests,
                           a.ints_of(list.at(layout.tokens_at(), 1), {head->count}),
                           a.floats_of(list.at(layout.logits_at(), 1), {head->count})));
  }
  return found;
}

}  // namespace

void register_choosing_ops(Class<Ops>& ops) {
  ops.def("top_k", &top_k, py::arg("logits"), py::arg("k"))
      .def("shortlist", &shortlist, py::arg("logits"), py::arg("factor"));
}

}  // namespace moeflux::python
