#include "engine/engine.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <utility>

#include "core/arena.h"
#include "core/error.h"
#include "core/forks.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "engine/batch.h"
#include "engine/footprint.h"
#include "engine/session.h"
#include "format/described_store.h"

namespace moeflux {
namespace {

constexpr int64_t longest_chunk = 8192;
constexpr int64_t max_routed_experts = 4096;  // how many a layer may have: the routers have room for these

EngineOptions checked(EngineOptions options) {
  const auto require = [](bool holds, const char* what, const char* expected, int64_t found) {
    if (!holds) throw ArgumentError(concat(what, ": expected ", expected, ", found ", found));
  };
  require(options.threads >= 0 && options.threads <= 1024, "threads", "0 to 1024", options.threads);
  require(options.readers >= 0 && options.readers <= 256, "readers", "0 to 256", options.readers);
  require(options.expert_slots >= 0, "expert_slots", "0 or more", options.expert_slots);
  require(options.host_slots >= 0, "host_slots", "0 or more", options.host_slots);
  require(options.ring_depth >= 1 && options.ring_depth <= 16, "ring_depth", "1 to 16", options.ring_depth);
  require(options.chunk >= 0 && options.chunk <= longest_chunk, "chunk", "0 to 8192", options.chunk);
  require(options.session_bytes >= 0, "session_bytes", "0 or more", options.session_bytes);
  require(options.host_session_bytes >= 0, "host_session_bytes", "0 or more", options.host_session_bytes);
  return options;
}

void check_store(const StoreDirectory& store, const EngineOptions& options) {
  if (!store.variant.is_whole() && options.speculate != Speculate::off)
    throw ArgumentError(concat("speculate: expected off with some of the layers, found ", name_of(options.speculate)));
  static_cast<void>(uses_draft(store.variant, options.speculate));  // whether there is the layer that mtp needs
  if (store.variant.experts().count > max_routed_experts)
    throw FormatError(concat(printable(store.listing), ": num_experts: expected at most ", max_routed_experts,
                             " experts in a layer, which is what this engine can choose from, found ",
                             store.variant.experts().count));
}

// Slots in the host's memory are for a device that has another.
void check_host_slots(const EngineOptions& options, bool shared) {
  if (options.host_slots > 0 && shared)
    throw ArgumentError(concat("host_slots: expected none on ", options.backend,
                               ", whose experts are in the host's memory already, found ", options.host_slots));
}

std::unique_ptr<Backend> backend_of(const EngineOptions& options, const EngineFaults& faults, OpTimes& times) {
  std::unique_ptr<Backend> backend = make_backend(
      options.backend, {options.isa, options.precision == Precision::exact, options.threads, options.device},
      faults.backend);
  check_host_slots(options, backend->shares_memory());
  if (options.time_ops) return std::make_unique<TimedBackend>(std::move(backend), times);
  return backend;
}

// Whether an engine of these options has less than the store does.
bool leaves_out(const StoreDirectory& store, const EngineOptions& options) {
  return options.layers != LayerRange{} || (store.variant.draft && !uses_draft(store.variant, options.speculate));
}

// The store becomes what such an engine has of it, and the options those of an engine that has all of that.
void leave_out(StoreDirectory& store, EngineOptions& options) {
  const LayerRange asked = std::exchange(options.layers, {});
  keep_layers(store, asked.first, asked.last);
  if (store.variant.draft && !uses_draft(store.variant, options.speculate)) leave_draft_out(store);
}

Scratch make_scratch(Model& model, int64_t chunk, Backend& backend) {
  Scratch scratch;
  ScratchLayout layout = scratch_layout(model.variant, model.layers, model.output, model.draft, chunk, scratch);
  scratch.memory = layout.allocate(backend);
  scratch.angles = layout.angles();
  return scratch;
}

}  // namespace

Footprint footprint(const StoreDirectory& store, const EngineOptions& options, const SessionOptions& session) {
  return footprint(store, options, session, false);
}

Footprint device_footprint(const StoreDirectory& store, const EngineOptions& options, const SessionOptions& session) {
  return device_footprint(store, options, session, false);
}

namespace {

// Calls `say` with the store that an engine of these options would have, with options that are resolved, and with
// whether host and device would share their memory.
template <typename Say>
std::invoke_result_t<Say, StoreDirectory, EngineOptions, bool> say_of_engine(const StoreDirectory& store,
                                                                             const EngineOptions& options, bool apart,
                                                                             const Say& say) {
  if (leaves_out(store, options)) {
    StoreDirectory rest = store;
    EngineOptions of_rest = options;
    leave_out(rest, of_rest);
    return say_of_engine(rest, of_rest, apart, say);
  }
  check_store(store, options);
  const EngineOptions chosen = resolved(store, checked(options));
  const bool shared = device_entry(chosen.backend).shares_memory && !apart;
  check_host_slots(chosen, shared);
  return say(store, chosen, shared);
}

}  // namespace

Footprint footprint(const StoreDirectory& store, const EngineOptions& options, const SessionOptions& session,
                    bool apart) {
  return say_of_engine(store, options, apart, [&](const StoreDirectory& had, const EngineOptions& chosen, bool shared) {
    Footprint bytes = engine_footprint(had, chosen, shared, device_entry(chosen.backend).maps_files && !apart);
    bytes += session_footprint(had.variant, resolved(had.variant, session), drafts_of(chosen.speculate), chosen.chunk,
                               shared, device_entry(chosen.backend).delta_room);
    return bytes;
  });
}

Footprint device_footprint(const StoreDirectory& store, const EngineOptions& options, const SessionOptions& session,
                           bool apart) {
  return say_of_engine(store, options, apart, [&](const StoreDirectory& had, const EngineOptions& chosen, bool shared) {
    if (shared) return Footprint{};
    Footprint bytes = engine_device_footprint(had, chosen);
    bytes += session_device_footprint(had.variant, resolved(had.variant, session), drafts_of(chosen.speculate),
                                      chosen.chunk, device_entry(chosen.backend).delta_room);
    return bytes;
  });
}

std::vector<std::string> kernels_to_compile(const StoreDirectory& store, const EngineOptions& options, DType rows) {
  const auto say = [&](const StoreDirectory& had, const EngineOptions& chosen, bool) -> std::vector<std::string> {
    const auto to_compile = device_entry(chosen.backend, chosen.device).to_compile;
    if (!to_compile) return {};
    return to_compile(work_sizes(had, make_blocks(had.variant), chosen), rows, chosen.device);
  };
  return say_of_engine(store, options, false, say);
}

std::shared_ptr<Engine> Engine::open(const std::string& folder, const EngineOptions& options) {
  StoreDirectory store = open_described_store(folder);
  if (options.verify_reads) store.expert_checksums = read_expert_checksums(folder, store.variant);
  return open(std::move(store), options);
}

std::shared_ptr<Engine> Engine::open(StoreDirectory store, const EngineOptions& options) {
  return open_engine(std::move(store), options, {});
}

std::shared_ptr<Engine> open_engine(StoreDirectory store, const EngineOptions& options, const EngineFaults& faults) {
  EngineOptions of_rest = options;
  if (leaves_out(store, options)) leave_out(store, of_rest);
  check_store(store, options);
  // A forked child leaves its copy alone, because it has no threads to join.
  const auto destroy = [before = forks()](LoadedEngine* engine) {
    if (forks() == before) delete engine;
  };
  const EngineOptions chosen = resolved(store, checked(std::move(of_rest)));
  return std::shared_ptr<LoadedEngine>(new LoadedEngine(std::move(store), chosen, faults), destroy);
}

LoadedEngine::LoadedEngine(StoreDirectory store, const EngineOptions& options, const EngineFaults& faults)
    : process_(getpid()),
      forks_(forks()),
      session_memory_(options.session_bytes, options.host_session_bytes),
      backend_(backend_of(options, faults, op_times_)),
      model_(load_model(store, *backend_, options.on_load)),
      scratch_(make_scratch(model_, options.chunk, *backend_)),
      picks_(*backend_, max_top_k * 8, "top-k"),
      speculate_(options.speculate),
      drafts_(drafts_of(options.speculate)),
      draft_source_(faults.drafts ? faults.drafts : look_up),
      believes_layer_(!faults.drafts),
      draft_governor_(options.speculate),
      prepared_(backend_->prepare(work_sizes(store, model_.layers, options))),
      experts_(store, *backend_, options, faults.open),
      ngrams_(store, options.chunk, *backend_, experts_.pool(), experts_.read_mode(), faults.open),
      recorder_(*backend_, options.ring_depth, store.variant.experts().count) {
  add_pools(store.variant, pools_);
  add_pools(draft_variant(store.variant), draft_pools_);
  count_tables();
}

void LoadedEngine::add_pools(const Variant& variant, PoolsByType& to) {
  for (const DType type : {DType::f32, DType::bf16, DType::i8})
    for (const RowKind& kind : state_layout(variant, type, nullptr).kinds)
      to[index_of(type)].emplace_back(*backend_, session_memory_, kind.block_bytes);
}

void LoadedEngine::check_process() const {
  if (forks() != forks_)
    throw StateError(concat("session: expected the process that loaded the model (", process_,
                            "), found a child of it (", getpid(), "): load the model there"));
}

std::string LoadedEngine::describe() const {
  const std::string drafts = drafts_ > 0 ? concat(", speculate ", name_of(speculate_)) : "";
  const std::string part = model_.variant.is_whole() ? "" : concat(", ", model_.variant.layers_named());
  return concat(backend_->describe(), ", ", experts_.describe(), drafts, part);
}

std::unique_ptr<Session> LoadedEngine::session(const SessionOptions& options) {
  check_process();
  return std::make_unique<EngineSession>(std::static_pointer_cast<LoadedEngine>(shared_from_this()), options);
}

Footprint LoadedEngine::memory() const {
  Footprint bytes = session_memory_.held();
  bytes.dense_weights = model_.weights.bytes();
  bytes.expert_slots = arena_bytes(experts_.slot_bytes());
  bytes.host_slots = arena_bytes(experts_.host_slot_bytes());
  bytes.scratch = picks_.bytes() + prepared_;
  for (const std::unique_ptr<Buffer>& buffer : scratch_.memory)
    if (buffer) bytes.scratch += arena_bytes(buffer->bytes());
  bytes.read_buffers = experts_.read_buffers() + experts_.staging();
  bytes.tables = tables_;
  bytes.ngram_rows = ngrams_.rows();
  return bytes;
}

int64_t LoadedEngine::step_bytes() const {
  const Variant& v = model_.variant;
  const Matrix& embed = model_.embed;
  int64_t bytes = model_.weights.bytes();
  const bool is_head = v.tied_embeddings && v.ends();
  if (v.begins() && !is_head) bytes -= (embed.rows - 1) * embed.format.row_bytes(embed.columns);
  for (int64_t layer = 0; layer < v.num_layers(); ++layer)
    if (v.is_moe(layer)) bytes += v.experts().per_token * experts_.expert_bytes();
  return bytes;
}

double LoadedEngine::read_rate(double seconds) {
  check_process();
  const std::unique_lock turn = take_turn();
  return experts_.read_rate(seconds);
}

double LoadedEngine::device_rate() {
  check_process();
  const std::unique_lock turn = take_turn();
  if (backend_->shares_memory()) return 0;
  constexpr int64_t bytes = int64_t{512} << 20;  // more than any cache
  const auto from = backend_->allocate(bytes, Memory::device, "a bandwidth");
  const auto to = backend_->allocate(bytes, Memory::device, "a bandwidth");
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 6; ++i) {
    const Stopwatch watch;
    backend_->copy({from.get()}, {to.get()}, bytes).wait();
    least = std::min(least, watch.seconds());
  }
  return 2 * static_cast<double>(bytes) / least;
}

std::vector<OpTime> LoadedEngine::take_op_times() {
  check_process();
  const std::unique_lock turn = take_turn();
  return op_times_.take();
}

void LoadedEngine::observe_routing(RoutingObserver observer) {
  check_process();
  const std::unique_lock turn = take_turn();
  if (!observer) return experts_.observe_routing({});
  experts_.observe_routing([layers = layers(), observer = std::move(observer)](int64_t layer, auto ids) {
    if (const int64_t number = layers.first + layer; number < layers.last) observer(number, ids);
  });
}

void LoadedEngine::observe_activations(const StoreDirectory& store, std::shared_ptr<ActivationMoments> moments) {
  check_process();
  const std::unique_lock turn = take_turn();
  backend_->observe(moments.get());  // first: where nobody can observe, there may be no addresses of weights either
  try {
    if (moments) moments->place(store, model_.weights, model_.variant.draft.has_value());
  } catch (...) {
    backend_->observe(moments_.get());
    throw;
  }
  moments_ = std::move(moments);
}

void LoadedEngine::parallel(int64_t units, const std::function<void(int64_t unit)>& body) {
  check_process();
  backend_->parallel(units, body);
}

StepStats LoadedEngine::evaluate(std::span<Work> work, const Interruption& interruption) {
  check_process();
  return Batch(*this, work).run(interruption);
}

std::unique_lock<Turn> LoadedEngine::take_turn(const Interruption& interruption) {
  constexpr auto patience = std::chrono::milliseconds(50);
  std::unique_lock turn(turn_, std::try_to_lock);
  if (!interruption && !turn) turn.lock();
  while (!turn && !turn.try_lock_for(patience)) interruption();
  return turn;
}

std::pair<int64_t, int64_t> LoadedEngine::steps_ahead() {
  const std::unique_lock turn = take_turn();
  return {next_step_.recorded(), next_step_.taken()};
}

void LoadedEngine::top_k(View logits, std::span<int32_t> ids, std::span<float> values) {
  const std::unique_lock turn = take_turn();
  const Mirrored picked_ids = picks_.begin();
  const Mirrored picked_values = picked_ids.at(max_top_k);
  const auto k = static_cast<int64_t>(ids.size());
  std::unique_ptr<Commands> commands = backend_->begin();
  commands->top_k(logits, model_.variant.vocab_size, k, picked_ids.device, picked_values.device);
  picked_ids.download(*commands, k * 4);
  picked_values.download(*commands, k * 4);
  backend_->submit(std::move(commands)).wait();
  std::memcpy(ids.data(), picked_ids.values<int32_t>(), ids.size_bytes());
  std::memcpy(values.data(), picked_values.values<float>(), values.size_bytes());
}

void LoadedEngine::download(const Mirrored& numbers, int64_t bytes) {
  const std::unique_lock turn = take_turn();
  std::unique_ptr<Commands> commands = backend_->begin();
  numbers.download(*commands, bytes);
  backend_->submit(std::move(commands)).wait();
}

StepStats& StepStats::operator+=(const StepStats& other) {
  tokens += other.tokens;
  seconds += other.seconds;
  compute_seconds += other.compute_seconds;
  router_seconds += other.router_seconds;
  beside_seconds += other.beside_seconds;
  arrived_seconds += other.arrived_seconds;
  read_wait_seconds += other.read_wait_seconds;
  read_busy_seconds += other.read_busy_seconds;
  bytes_read += other.bytes_read;
  expert_hits += other.expert_hits;
  expert_misses += other.expert_misses;
  host_hits += other.host_hits;
  experts_on_cpu += other.experts_on_cpu;
  bytes_copied += other.bytes_copied;
  ngram_hits += other.ngram_hits;
  ngram_misses += other.ngram_misses;
  submissions += other.submissions;
  waits += other.waits;
  look_ahead_reads += other.look_ahead_reads;
  look_ahead_used += other.look_ahead_used;
  look_ahead_wasted_bytes += other.look_ahead_wasted_bytes;
  if (other.look_ahead_pays) look_ahead_pays = other.look_ahead_pays;
  drafted += other.drafted;
  accepted += other.accepted;
  if (other.drafts_pay) drafts_pay = other.drafts_pay;
  return *this;
}

}  // namespace moeflux
