#include "engine/expert_side.h"

#include <algorithm>
#include <array>
#include <chrono>

#include "core/error.h"

namespace moeflux {
namespace {

constexpr int default_readers = 4;

int64_t count_of_slots(const Variant& variant, const EngineOptions& options) {
  int64_t all = 0;
  for (int64_t layer = 0; layer < variant.num_layers(); ++layer) all += variant.is_moe(layer) ? variant.num_experts : 0;
  const int64_t slots = options.expert_slots == 0 ? all : std::min(options.expert_slots, all);
  if (slots < variant.experts_per_token)
    throw BudgetError(concat("expert_slots: expected at least ", variant.experts_per_token,
                             ", the experts of one token in one layer, found ", options.expert_slots));
  return slots;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

ExpertSide::ExpertSide(const StoreDirectory& store, Backend& backend, const EngineOptions& options, int64_t chunk,
                       const ReaderFactory& open)
    : backend_(backend),
      store_(store, {ReadMode::buffered, open}),
      memory_(backend.allocate(count_of_slots(store.variant, options) * store_.slot().bytes, "expert slots")),
      cache_({memory_->data(), static_cast<size_t>(memory_->bytes())},
             {store.variant.num_layers(), store.variant.num_experts, count_of_slots(store.variant, options),
              store_.slot().bytes}),
      pool_(options.readers ? options.readers : default_readers, store_.bounce()),
      loader_(store_, pool_, cache_),
      groups_(store.variant.num_experts, chunk * store.variant.experts_per_token),
      experts_per_token_(store.variant.experts_per_token),
      ring_(options.ring_depth) {
  const auto experts = static_cast<size_t>(store.variant.num_experts);
  missing_.reserve(experts);
  jobs_.reserve(experts);
  leases_.reserve(experts);
  for (Wave& wave : waves_) {
    wave.groups.reserve(experts);
    wave.leases.reserve(experts);
  }
}

void record_feed_forward(Commands& commands, const FeedForwardWeights& w, View x, View out, Scratch& s, int64_t n) {
  const int64_t width = w.gate.rows;
  const std::array into = {Product{x, w.gate.columns, w.gate, s.gate, width},
                           Product{x, w.up.columns, w.up, s.up, width}};
  commands.matmul(into, n);
  commands.swiglu(s.gate, s.up, s.gate, n * width);
  commands.matmul(std::array{Product{s.gate, width, w.down, out, w.down.rows}}, n);
}

void ExpertSide::run(std::unique_ptr<Commands>& commands, const Model& model, int64_t layer, Scratch& s, int64_t n,
                     StepStats& stats) {
  const Variant& v = model.variant;
  const ExpertSideWeights& w = model.weights.layers[static_cast<size_t>(layer)].experts;
  route(commands, model, layer, s, n, stats);
  groups_.assign({s.ids.i32(), static_cast<size_t>(n * experts_per_token_)});
  sort_out(layer, stats);

  Wave* reading = &waves_[0];
  Wave* computing = &waves_[1];
  begin_wave(*reading, layer, stats);
  if (v.shared_expert != SharedExpert::none) record_feed_forward(*commands, w.shared, s.normed, s.shared, s, n);
  record_jobs(*commands, s);
  while (!reading->groups.empty() || next_missing_ < missing_.size()) {
    if (reading->groups.empty()) {
      // Every slot is in use by what was recorded: let it finish.
      submit(commands, stats);
      ring_.pop();
      begin_wave(*reading, layer, stats);
      continue;
    }
    std::swap(reading, computing);
    begin_wave(*reading, layer, stats);
    end_reads(*computing, stats);
    add_jobs(*computing);
    record_jobs(*commands, s);
  }
  commands->combine({s.hidden, s.expert_out, s.weights, v.hidden_size, experts_per_token_,
                     w.shared.gate.rows ? s.shared : View{}, w.shared_gate.rows ? s.shared_gate : View{}, s.hidden},
                    n);
  submit(commands, stats);
}

// Norm, router logits, choice: the one point of a layer where the host waits.
void ExpertSide::route(std::unique_ptr<Commands>& commands, const Model& model, int64_t layer, Scratch& s, int64_t n,
                       StepStats& stats) {
  const Variant& v = model.variant;
  const LayerWeights& weights = model.weights.layers[static_cast<size_t>(layer)];
  const ExpertSideWeights& w = weights.experts;
  commands->rms_norm(s.hidden, weights.post_norm, s.normed, n, v.hidden_size, model.eps());
  const std::array products = {Product{s.normed, v.hidden_size, w.router, s.router, v.num_experts},
                               Product{s.normed, v.hidden_size, w.shared_gate, s.shared_gate, 1}};
  commands->matmul({products.data(), w.shared_gate.rows ? products.size() : 1}, n);
  RouteArgs args = {.logits = s.router,
                    .experts = v.num_experts,
                    .k = v.experts_per_token,
                    .normalize = v.normalize_topk,
                    .scaling = static_cast<float>(v.routed_scaling),
                    .bias = w.bias,
                    .groups = v.num_groups,
                    .groups_kept = v.groups_per_token,
                    .ids = s.ids,
                    .weights = s.weights};
  if (v.router == Router::softmax)
    commands->route_softmax(args, n);
  else
    commands->route_grouped(args, n);
  Ticket ticket = backend_.submit(std::move(commands));
  ++stats.submissions;
  ++stats.waits;
  ticket.wait();
  commands = backend_.begin();
}

// Jobs for the experts that are in a slot, a list of those that are not.
void ExpertSide::sort_out(int64_t layer, StepStats& stats) {
  missing_.clear();
  next_missing_ = 0;
  jobs_.clear();
  for (const ExpertGroups::Group& group : groups_.groups()) {
    if (!cache_.contains(layer, group.expert)) {
      missing_.push_back(group);
      continue;
    }
    leases_.push_back(cache_.acquire(layer, group.expert).lease);
    jobs_.push_back({matrices(leases_.back().slot()), group.pairs, group.count});
  }
  stats.expert_hits += static_cast<int64_t>(jobs_.size());
  stats.expert_misses += static_cast<int64_t>(missing_.size());
}

// Leases slots for missing experts and has them read. When not all of them have room, half of the room is left to the
// wave that is read while this one computes.
void ExpertSide::begin_wave(Wave& wave, int64_t layer, StepStats& stats) {
  wave.groups.clear();
  const auto missing = static_cast<int64_t>(missing_.size() - next_missing_);
  if (cache_.spare() < missing) ring_.collect();
  const int64_t room = cache_.spare();
  const int64_t count = missing <= room ? missing : (room + 1) / 2;
  if (count == 0) return;
  unconfirmed_ = true;
  const int64_t parts = std::max<int64_t>(1, pool_.threads() / count);
  for (int64_t i = 0; i < count; ++i) {
    const ExpertGroups::Group& group = missing_[next_missing_++];
    wave.groups.push_back(group);
    wave.leases.push_back(loader_.demand(layer, group.expert, parts).lease);
    stats.bytes_read += store_.experts().bytes;
  }
}

void ExpertSide::end_reads(Wave& wave, StepStats& stats) {
  const auto start = std::chrono::steady_clock::now();
  for (const Lease& lease : wave.leases) loader_.wait(lease);
  stats.read_wait_seconds += seconds_since(start);
}

void ExpertSide::add_jobs(Wave& wave) {
  for (size_t i = 0; i < wave.groups.size(); ++i) {
    jobs_.push_back({matrices(wave.leases[i].slot()), wave.groups[i].pairs, wave.groups[i].count});
    leases_.push_back(std::move(wave.leases[i]));
  }
  wave.leases.clear();
  wave.groups.clear();
}

void ExpertSide::record_jobs(Commands& commands, Scratch& s) {
  if (jobs_.empty()) return;
  commands.expert_ffn({s.normed, store_.experts().hidden, store_.experts().intermediate, experts_per_token_, jobs_,
                       s.expert_scratch, s.expert_out});
  jobs_.clear();
}

// What was recorded goes on its way with its leases, and is not waited for.
void ExpertSide::submit(std::unique_ptr<Commands>& commands, StepStats& stats) {
  Ticket ticket = backend_.submit(std::move(commands));
  ++stats.submissions;
  commands = backend_.begin();
  const int64_t waits = ring_.waits();
  ring_.push(std::move(ticket), leases_);
  stats.waits += ring_.waits() - waits;
}

void ExpertSide::finish(StepStats& stats) {
  const int64_t waits = ring_.waits();
  ring_.drain();
  stats.waits += ring_.waits() - waits;
  if (!unconfirmed_) return;
  try {
    store_.check_unchanged();
  } catch (...) {
    cache_.drop_all();
    throw;
  }
  unconfirmed_ = false;
}

void ExpertSide::abandon() noexcept {
  loader_.give_up();
  for (Wave& wave : waves_) {
    wave.leases.clear();
    wave.groups.clear();
  }
  try {
    ring_.drain();
  } catch (...) {
    // The failure that brought us here is the one to report.
  }
  leases_.clear();
  jobs_.clear();
}

ExpertMatrices ExpertSide::matrices(int64_t slot) const {
  const ExpertLayout& layout = store_.experts();
  const SlotLayout& places = store_.slot();
  size_t piece = 0;
  const auto next = [&] { return View{memory_.get(), slot * places.bytes + places.offsets[piece++]}; };
  const auto matrix = [&](const QuantFormat& format, int64_t rows, int64_t columns) {
    Matrix m = {format, rows, columns, next(), {}, {}};
    if (format.is_affine()) {
      m.scales = next();
      m.biases = next();
    }
    return m;
  };
  ExpertMatrices result;
  result.gate = matrix(layout.formats.gate, layout.intermediate, layout.hidden);
  result.up = matrix(layout.formats.up, layout.intermediate, layout.hidden);
  result.down = matrix(layout.formats.down, layout.hidden, layout.intermediate);
  return result;
}

}  // namespace moeflux
