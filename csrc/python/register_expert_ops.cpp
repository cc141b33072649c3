// The ops of experts, for register_ops.cpp.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "backend/host_experts.h"
#include "core/error.h"
#include "core/stopwatch.h"
#include "kernels/cpu/isa.h"
#include "python/ops.h"

namespace moeflux::python {
namespace {

using StoredExperts = std::vector<std::tuple<py::object, py::object, py::object>>;

// Each expert is (gate, up, down). They are put in slots.
std::vector<ExpertMatrices> experts_of(OpArguments& a, const StoredExperts& experts, int64_t hidden,
                                       int64_t intermediate) {
  std::vector<ExpertMatrices> matrices;
  for (const auto& [gate, up, down] : experts) {
    const ExpertMatrices expert{a.matrix("gate", gate), a.matrix("up", up), a.matrix("down", down)};
    for (const Matrix* each : {&expert.gate, &expert.up})
      a.require(each->rows == intermediate && each->columns == hidden, "gate or up",
                concat(intermediate, " rows of ", hidden), each->rows);
    a.require(expert.down.rows == hidden && expert.down.columns == intermediate, "down",
              concat(hidden, " rows of ", intermediate), expert.down.rows);
    matrices.push_back(expert);
  }
  return a.in_slots("experts", std::move(matrices));
}

// Biases of `count` experts: gate, up and down, or none. `clamped`: alpha and limit, or none.
using Biases = std::optional<std::tuple<Array, Array, Array>>;
using Clamped = std::optional<std::pair<float, float>>;

ExpertFlavour flavour_of(OpArguments& a, const Biases& biases, const Clamped& clamped, int64_t count, int64_t hidden,
                         int64_t intermediate) {
  ExpertFlavour flavour;
  if (biases) {
    const auto& [gate, up, down] = *biases;
    flavour.gate_bias = a.floats("gate bias", gate, {count, intermediate});
    flavour.up_bias = a.floats("up bias", up, {count, intermediate});
    flavour.down_bias = a.floats("down bias", down, {count, hidden});
  }
  if (!clamped) return flavour;
  std::tie(flavour.alpha, flavour.limit) = *clamped;
  a.require(flavour.limit > 0, "clamped", "a limit above 0", static_cast<int64_t>(flavour.limit));
  return flavour;
}

void require_digits(const Ops& ops) {
  if (ops.backend->isa().empty()) throw ArgumentError(concat("digits: expected the CPU, found ", ops.backend->name()));
}

// What a job names, checked.
const ExpertMatrices& expert_of(const OpArguments& a, const std::vector<ExpertMatrices>& matrices, int64_t expert) {
  a.require(expert >= 0 && expert < static_cast<int64_t>(matrices.size()), "jobs", "the number of an expert", expert);
  return matrices[static_cast<size_t>(expert)];
}
void require_pair(const OpArguments& a, int32_t pair, int64_t pairs) {
  a.require(pair >= 0 && pair < pairs, "jobs", concat("pairs 0 to ", pairs - 1), pair);
}

// Each job is the number of an expert and its pairs.
py::object expert_ffn(const Ops& ops, const Array& x, const StoredExperts& experts,
                      const std::vector<std::pair<int64_t, std::vector<int32_t>>>& jobs, int64_t k,
                      int64_t intermediate, const Biases& biases, const Clamped& clamped, bool geglu) {
  OpArguments a = ops.arguments("expert_ffn");
  ExpertArgs args;
  args.x = a.floats("x", x, {-1, -1});
  const int64_t n = x.shape(0);
  a.require(k > 0, "k", "at least 1", k);
  args.rows = n;
  args.hidden = x.shape(1);
  args.intermediate = intermediate;
  args.k = k;
  const std::vector<ExpertMatrices> matrices = experts_of(a, experts, args.hidden, intermediate);
  std::vector<ExpertJob> recorded;
  std::vector<bool> taken(static_cast<size_t>(n * k));
  for (const auto& [expert, places] : jobs) {
    const ExpertMatrices& own = expert_of(a, matrices, expert);
    for (const int32_t place : places) {
      require_pair(a, place, n * k);
      // Two jobs with the same pair would write the same row.
      a.require(!taken[static_cast<size_t>(place)], "jobs", "every pair in one job, once", place);
      taken[static_cast<size_t>(place)] = true;
    }
    recorded.push_back({own, places.data(), static_cast<int64_t>(places.size()), expert});
  }
  args.flavour = flavour_of(a, biases, clamped, static_cast<int64_t>(matrices.size()), args.hidden, intermediate);
  args.flavour.geglu = geglu;
  args.jobs = recorded;
  args.scratch = a.output(n * k * 2 * intermediate);
  args.out = a.output(n * k * args.hidden);
  a.run([&](Commands& commands) { commands.expert_ffn(args); });
  return a.floats_of(args.out, {n * k, args.hidden});
}

// As expert_ffn, with the bits of CUDA.
py::object digit_expert_ffn(const Ops& ops, const Array& x, const StoredExperts& experts,
                            const std::vector<std::pair<int64_t, std::vector<int32_t>>>& jobs, int64_t k,
                            int64_t intermediate, const Biases& biases, const Clamped& clamped, bool geglu) {
  OpArguments a = ops.arguments("digit_expert_ffn");
  require_digits(ops);
  const float* rows = a.values<float>(a.floats("x", x, {-1, -1}));
  const int64_t n = x.shape(0), hidden = x.shape(1);
  a.require(k > 0, "k", "at least 1", k);
  const std::vector<ExpertMatrices> matrices = experts_of(a, experts, hidden, intermediate);
  ExpertFlavour flavour = flavour_of(a, biases, clamped, static_cast<int64_t>(matrices.size()), hidden, intermediate);
  flavour.geglu = geglu;
  const View out = a.output(n * k * hidden);
  HostExperts kernels(ops.backend->isa(), 1);
  std::vector<std::byte> room(static_cast<size_t>(HostExperts::room_bytes(hidden, intermediate, 1)));
  for (const auto& [expert, pairs] : jobs) {
    const ExpertMatrices& own = expert_of(a, matrices, expert);
    a.require(HostExperts::takes(own), "experts", "affine formats or MXFP4 in all", 0);
    for (const int32_t pair : pairs) {
      require_pair(a, pair, n * k);
      const HostExpert one = {own, expert, a.values<float>(out) + pair * hidden};
      const Released release;
      kernels.run(std::span(&one, 1), rows + pair / k * hidden, flavour, room.data(),
                  [&](int64_t units, const auto& body) { ops.backend->parallel(units, body); });
    }
  }
  return a.floats_of(out, {n * k, hidden});
}

// Seconds that a pass through all experts takes, one row each, `together` at a time.
double digit_expert_seconds(const Ops& ops, const Array& x, const StoredExperts& experts, int64_t intermediate,
                            int64_t together) {
  OpArguments a = ops.arguments("digit_expert_seconds");
  require_digits(ops);
  const auto* row = a.values<float>(a.floats("x", x, {-1}));
  const int64_t hidden = x.shape(0);
  const std::vector<ExpertMatrices> matrices = experts_of(a, experts, hidden, intermediate);
  a.require(together > 0, "together", "at least 1", together);
  std::vector<float> out(static_cast<size_t>(together * hidden));
  std::vector<std::byte> room(static_cast<size_t>(HostExperts::room_bytes(hidden, intermediate, together)));
  HostExperts kernels(ops.backend->isa(), together);
  std::vector<HostExpert> some;
  const Released release;
  const Stopwatch watch;
  for (size_t first = 0; first < matrices.size(); first += static_cast<size_t>(together)) {
    some.clear();
    for (size_t i = first; i < std::min(matrices.size(), first + static_cast<size_t>(together)); ++i)
      some.push_back({matrices[i], 0, out.data() + static_cast<int64_t>(i - first) * hidden});
    kernels.run(some, row, {}, room.data(),
                [&](int64_t units, const auto& body) { ops.backend->parallel(units, body); });
  }
  return watch.seconds();
}

py::object digit_exp(const Ops& ops, const Array& x) {
  OpArguments a = ops.arguments("digit_exp");
  const View in = a.floats("x", x, {-1}), out = a.output(x.shape(0));
  require_digits(ops);
  cpu::digit_kernels(cpu::choose_isa(ops.backend->isa())).exp(a.values<float>(in), a.values<float>(out), x.shape(0));
  return a.floats_of(out, {x.shape(0)});
}

py::object chosen_expert_ffn(const Ops& ops, const Array& x, const StoredExperts& experts, const Array& ids,
                             int64_t intermediate, const Biases& biases, const Clamped& clamped, bool geglu) {
  OpArguments a = ops.arguments("chosen_expert_ffn");
  ChosenExpertArgs args;
  args.x = a.floats("x", x, {-1, -1});
  const int64_t n = x.shape(0);
  args.hidden = x.shape(1);
  args.intermediate = intermediate;
  args.ids = a.ints("ids", ids, {n, -1});
  args.k = ids.shape(1);
  const std::vector<ExpertMatrices> matrices = experts_of(a, experts, args.hidden, intermediate);
  a.require(!matrices.empty(), "experts", "at least 1", 0);
  const auto count = static_cast<int64_t>(matrices.size());
  args.flavour = flavour_of(a, biases, clamped, count, args.hidden, intermediate);
  args.flavour.geglu = geglu;
  args.experts = count;
  args.slots = a.output(2 * count);
  for (int64_t i = 0; i < count; ++i) {
    const auto slot = static_cast<uint64_t>(matrices[static_cast<size_t>(i)].gate.weight.offset);
    std::memcpy(a.values<std::byte>(args.slots) + i * 8, &slot, sizeof slot);
    args.alignment = std::gcd(i == 0 ? 0 : args.alignment, matrices[static_cast<size_t>(i)].gate.weight.offset);
  }
  for (int64_t pair = 0; pair < n * args.k; ++pair)
    a.require(a.values<int32_t>(args.ids)[pair] >= 0 && a.values<int32_t>(args.ids)[pair] < count, "ids",
              concat("0 to ", count - 1), a.values<int32_t>(args.ids)[pair]);
  args.first = matrices.front();
  args.scratch = a.output(n * args.k * 2 * intermediate);
  args.out = a.output(n * args.k * args.hidden);
  a.run([&](Commands& commands) { commands.chosen_expert_ffn(args, n); });
  return a.floats_of(args.out, {n * args.k, args.hidden});
}

}  // namespace

void register_expert_ops(Class<Ops>& ops) {
  ops.def("expert_ffn", &expert_ffn, py::arg("x"), py::arg("experts"), py::arg("jobs"), py::arg("k"),
          py::arg("intermediate"), py::arg("biases") = py::none(), py::arg("clamped") = py::none(),
          py::arg("geglu") = false)
      .def("digit_expert_ffn", &digit_expert_ffn, py::arg("x"), py::arg("experts"), py::arg("jobs"), py::arg("k"),
           py::arg("intermediate"), py::arg("biases") = py::none(), py::arg("clamped") = py::none(),
           py::arg("geglu") = false)
      .def("digit_expert_seconds", &digit_expert_seconds, py::arg("x"), py::arg("experts"), py::arg("intermediate"),
           py::arg("together"), "How long all of these experts take for a row, so many at a time. For benches.")
      .def("digit_exp", &digit_exp, py::arg("x"))
      .def("chosen_expert_ffn", &chosen_expert_ffn, py::arg("x"), py::arg("experts"), py::arg("ids"),
           py::arg("intermediate"), py::arg("biases") = py::none(), py::arg("clamped") = py::none(),
           py::arg("geglu") = false);
}

}  // namespace moeflux::python
