#include "engine/experts/experts_on_cpu.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/arena.h"
#include "core/rounding.h"
#include "core/stopwatch.h"

namespace moeflux {
namespace {

constexpr int64_t row_alignment = 64;
constexpr int rounds = 8;  // of what is measured, each with other experts; the fastest counts
// Longer than from one layer to the next, so that no thread sleeps during a step.
constexpr std::chrono::microseconds lookout{500};

int64_t bytes_of_row(const StoreDirectory& store) {
  return round_up(store.experts.hidden * int64_t{sizeof(float)}, row_alignment);
}

int64_t bytes_of(const StoreDirectory& store) {
  const ExpertLayout& layout = store.experts;
  const int64_t k = store.variant.experts().per_token;
  return (1 + k) * bytes_of_row(store) + HostExperts::room_bytes(layout.hidden, layout.intermediate, k);
}

int64_t first_layer(const ExpertStore& store) {
  int64_t layer = 0;
  while (!store.has_experts(layer)) ++layer;
  return layer;
}

}  // namespace

ExpertsOnCpu::ExpertsOnCpu(const StoreDirectory& store, ExpertSlots& slots, Backend& backend,
                           const EngineOptions& options)
    : slots_(slots),
      row_bytes_(bytes_of_row(store)),
      memory_(backend.allocate(bytes_of(store), Memory::staging, "experts on the CPU")),
      room_(memory_->host() + out_place(store.variant.experts().per_token)),
      kernels_(options.isa, store.variant.experts().per_token),
      threads_(options.threads, lookout),
      all_(options.cpu_experts == CpuExperts::all) {
  const int64_t k = store.variant.experts().per_token, layer = first_layer(slots.store());
  experts_.reserve(static_cast<size_t>(k));
  pairs_.reserve(static_cast<size_t>(k));
  leases_.reserve(static_cast<size_t>(k));
  if (all_ || !HostExperts::takes(slots.host_matrices(layer, 0))) return;
  times_ = measured(backend, layer, std::min({slots.count(), slots.host_count(), k}));
  // A step waits for the threads in each of its layers, which this does not count. On an H200 with 16 cores, where an
  // expert takes longer here than its copy, steps were slower however the experts were shared out.
  pays_ = times_.call + times_.computed < times_.moved;
}

ExpertsOnCpu::~ExpertsOnCpu() { finish(); }

int64_t ExpertsOnCpu::planned_bytes(const StoreDirectory& store, const EngineOptions& options) {
  return options.cpu_experts == CpuExperts::off ? 0 : arena_bytes(bytes_of(store));
}

int64_t ExpertsOnCpu::bytes() const { return arena_bytes(memory_->bytes()); }

// ---- Who computes what ----------------------------------------------------------------------------------------------

// Of experts one by one and of as many as a token has. They come from slots in turn, so that caches have as few of them
// as in a step.
ExpertsOnCpu::Times ExpertsOnCpu::measured(Backend& backend, int64_t layer, int64_t most) {
  std::fill_n(memory_->host(), row_bytes_, std::byte{});
  int64_t next = 0;
  const auto first_of = [&](int64_t count) {
    if (next + count > slots_.host_count()) next = 0;
    return std::exchange(next, next + count);
  };
  const auto least = [](const auto& seconds) {
    double found = std::numeric_limits<double>::infinity();
    for (int round = 0; round < rounds; ++round) found = std::min(found, seconds());
    return found;
  };
  std::vector<CopyArgs> copies(static_cast<size_t>(most));
  const double moved = least([&] {
    const int64_t first = first_of(most);
    for (int64_t i = 0; i < most; ++i) copies[static_cast<size_t>(i)] = slots_.copy_from_host(first + i, i);
    const Stopwatch watch;
    backend.copy_all(copies).reach();
    return watch.seconds();
  });
  const double of_one = least([&] { return computed_once(backend, layer, first_of(1), 1); });
  const double of_most = least([&] { return computed_once(backend, layer, first_of(most), most); });
  const double each = most > 1 ? std::max(0.0, (of_most - of_one) / static_cast<double>(most - 1)) : of_one;
  return {moved / static_cast<double>(most), std::max(0.0, of_one - each), each};
}

// Until the outputs are on the device, as in a step.
double ExpertsOnCpu::computed_once(Backend& backend, int64_t layer, int64_t first, int64_t count) {
  for (int64_t i = 0; i < count; ++i) experts_.push_back({slots_.host_matrices(layer, first + i), 0, out(i)});
  std::unique_ptr<Commands> commands = backend.begin();
  const int64_t hold = commands->hold();
  for (int64_t i = 0; i < count; ++i)
    commands->copy({memory_.get(), out_place(i)}, slots_.copy_from_host(0, i).to, row_bytes_);
  Ticket ticket = backend.submit(std::move(commands));
  const Stopwatch watch;
  begin();
  finish();
  backend.release(hold);
  ticket.reach();
  return watch.seconds();
}

bool ExpertsOnCpu::serves(const ExpertCall& call) const {
  // Biases lie in the device's memory.
  return pays_ && call.n == 1 && !call.block.flavour().gate_bias &&
         HostExperts::takes(slots_.host_matrices(call.layer(), 0));
}

int64_t ExpertsOnCpu::share(int64_t experts, int64_t coming) const {
  if (all_) return experts;
  int64_t best = 0;
  double soonest = static_cast<double>(coming + experts) * times_.moved;
  for (int64_t here = 1; here <= experts; ++here) {
    const double computed = times_.call + static_cast<double>(here) * times_.computed;
    const double moved = static_cast<double>(coming + experts - here) * times_.moved;
    if (std::max(computed, moved) >= soonest) continue;
    soonest = std::max(computed, moved);
    best = here;
  }
  return best;
}

// ---- A layer --------------------------------------------------------------------------------------------------------

void ExpertsOnCpu::record_x(const ExpertCall& call) const {
  const int64_t bytes = slots_.store().experts(call.layer()).hidden * int64_t{sizeof(float)};
  call.commands().copy(call.scratch.normed, {memory_.get(), 0}, bytes);
}

void ExpertsOnCpu::add(const ExpertCall& call, const ExpertGroups::Group& group, Lease lease) {
  const int32_t pair = group.pairs[0];
  leases_.push_back(std::move(lease));
  pairs_.push_back(pair);
  experts_.push_back({slots_.host_matrices(call.layer(), leases_.back().slot()), group.expert, out(pair)});
  flavour_ = call.block.flavour();
}

void ExpertsOnCpu::begin() {
  if (experts_.empty()) return;
  kernels_.begin(experts_, x(), flavour_, room_);
  threads_.begin(threads_.threads(), work_);
  has_begun_ = true;
}

void ExpertsOnCpu::record_outputs(const ExpertCall& call) const {
  for (const int32_t pair : pairs_) call.block.record_output(call.commands(), pair, {memory_.get(), out_place(pair)});
}

void ExpertsOnCpu::finish() {
  if (std::exchange(has_begun_, false)) threads_.finish();
  experts_.clear();
  pairs_.clear();
  leases_.clear();
}

}  // namespace moeflux
