// Recording which experts a model's router picks, and playing a record against the cache's policies.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "core/error.h"
#include "engine/engine.h"
#include "engine/routing_counts.h"
#include "engine/routing_trace.h"
#include "io/replay.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace moeflux::python {
namespace {

// u16 [tokens, layers, k]
using Ids = py::array_t<uint16_t, py::array::c_style>;

py::tuple content(const RoutingTrace& trace) {
  const RoutingTrace::Content content = [&] {
    const Released release;
    return trace.content();
  }();
  const auto layers = static_cast<py::ssize_t>(trace.layers().size());
  Ids ids({static_cast<py::ssize_t>(content.tokens), layers, static_cast<py::ssize_t>(trace.experts_per_token())});
  std::ranges::copy(content.ids, ids.mutable_data());
  return py::make_tuple(ids, py::array_t<int64_t>(py::ssize_t(content.per_pass.size()), content.per_pass.data()));
}

template <typename Observed>
void observe(Engine& engine, std::shared_ptr<Observed> observed) {
  RoutingObserver observer;
  if (observed)
    observer = [kept = std::move(observed)](int64_t layer, std::span<const int32_t> ids) { kept->add(layer, ids); };
  engine.observe_routing(std::move(observer));
}

py::array_t<int64_t> counts_of(const RoutingCounts& counts) {
  const std::vector<int64_t> all = counts.counts();
  py::array_t<int64_t> array({static_cast<py::ssize_t>(counts.layers().size()), py::ssize_t(counts.experts())});
  std::ranges::copy(all, array.mutable_data());
  return array;
}

// The caller has checked the ids. Those that could lead outside of a table are checked once more.
RecordedRouting routing_of(const Ids& ids, int64_t experts, int64_t slots) {
  constexpr py::ssize_t max_groups = py::ssize_t{1} << 31;
  if (ids.ndim() != 3 || ids.shape(1) < 1 || ids.shape(2) < 1 || ids.shape(0) * ids.shape(1) > max_groups)
    throw py::value_error("expected ids [tokens, layers, k]");
  const std::span<const uint16_t> all(ids.data(), static_cast<size_t>(ids.size()));
  if (std::ranges::any_of(all, [&](uint16_t id) { return id >= experts; }))
    throw py::value_error("expected ids below the number of experts");
  if (slots < ids.shape(2) || slots > experts * ids.shape(1))
    throw py::value_error("expected slots for the experts of a token in a layer, and at most one for every expert");
  return {all, ids.shape(1), experts, ids.shape(2)};
}

ReplayCounts play(const RecordedRouting& routing, const std::string& policy, int64_t slots, int64_t ring_depth) {
  if (policy == "optimum") return replay_optimum(routing, slots, check_signals);
  return replay(routing, choice_of<CachePolicy>("policy", policy), slots, ring_depth, check_signals);
}

}  // namespace

void register_trace(py::module_& m) {
  Class<RoutingTrace, std::shared_ptr<RoutingTrace>>(m, "RoutingTrace", "What routers picked. See moeflux.Model.trace.")
      .def(py::init([](const Engine& engine) { return std::make_shared<RoutingTrace>(engine.variant()); }),
           py::arg("engine"))
      .def_property_readonly("tokens", &RoutingTrace::tokens)
      .def_property_readonly("layers", &RoutingTrace::layers)
      .def("content", &content, "ids, u16 [tokens, layers, k], and the number of tokens of each pass.");
  Class<RoutingCounts, std::shared_ptr<RoutingCounts>>(
      m, "RoutingCounts", "How often routers picked each expert. See moeflux.Model.count_experts.")
      .def(py::init([](const Engine& engine) { return std::make_shared<RoutingCounts>(engine.variant()); }),
           py::arg("engine"))
      .def_property_readonly("layers", &RoutingCounts::layers)
      .def("counts", &counts_of, "i64 [layers, experts]");
  m.def("count_routing", &observe<RoutingCounts>, py::arg("engine"), py::arg("counts").none(true),
        py::call_guard<Released>(), "Counts in `counts` what the engine's routers pick from now on. None ends it.");
  m.def("record_routing", &observe<RoutingTrace>, py::arg("engine"), py::arg("trace").none(true),
        py::call_guard<Released>(), "Records in `trace` what the engine's routers pick from now on. None ends it.");
  m.def(
      "replay",
      [](const Ids& ids, int64_t experts, const std::string& policy, int64_t slots, int64_t ring_depth) {
        if (ring_depth < 1 || ring_depth > 16) throw py::value_error("expected a ring_depth of 1 to 16");
        const RecordedRouting routing = routing_of(ids, experts, slots);
        ReplayCounts counts;
        {
          const Released release;
          counts = play(routing, policy, slots, ring_depth);
        }
        return py::make_tuple(counts.hits, counts.misses);
      },
      py::arg("ids"), py::arg("experts"), py::arg("policy"), py::arg("slots"), py::arg("ring_depth") = 2,
      "(hits, misses) that a policy, or the optimum, has when these tokens are decoded.");
}

}  // namespace moeflux::python
