#include "engine/expert_side.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <random>
#include <utility>

#include "core/error.h"
#include "core/sha256.h"
#include "core/text.h"
#include "engine/expert_matrices.h"
#include "engine/footprint.h"
#include "io/probe.h"

namespace moeflux {
namespace {

// With a slot for every expert each is read once: through the page cache, which makes the next load of the model fast.
ReadMode read_mode(const StoreDirectory& store, const EngineOptions& options) {
  if (options.reads == "direct") return ReadMode::direct;
  if (options.reads == "buffered") return ReadMode::buffered;
  if (options.expert_slots == all_experts(store.variant)) return ReadMode::buffered;
  for (const std::vector<ExpertPlace>& places : store.expert_places)
    if (!places.empty() && !supports_direct(store.files[static_cast<size_t>(places.front().file)]))
      return ReadMode::buffered;
  return ReadMode::direct;
}

CachePolicy cache_policy(const std::string& word) {
  if (word == "lfu") return CachePolicy::lfu;
  return word == "none" ? CachePolicy::none : CachePolicy::lru;
}

LookAhead look_ahead_mode(const std::string& word) {
  if (word == "on") return LookAhead::on;
  return word == "off" ? LookAhead::off : LookAhead::automatic;
}

// Compares an expert that was read with the store's checksum of it: that of its pieces, one after another.
ExpertCheck expert_check(const StoreDirectory& store, const ExpertStore& experts, const EngineOptions& options) {
  if (!options.verify_reads) return {};
  if (store.expert_checksums.empty())
    throw StateError(
        concat("verify_reads: expected a store with a checksum of every expert, one that `moeflux convert` "
               "or `moeflux synth` wrote, found ",
               printable(store.listing), " without"));
  return [&experts, sums = store.expert_checksums](int64_t layer, int64_t expert, std::span<const std::byte> slot) {
    Sha256 hash;
    for (size_t i = 0; i < experts.experts().pieces.size(); ++i)
      hash.add(slot.subspan(static_cast<size_t>(experts.slot().offsets[i]),
                            static_cast<size_t>(experts.experts().pieces[i].bytes)));
    const Sha256Sum found = hash.sum();
    const Sha256Sum& expected = sums.at(static_cast<size_t>(layer)).at(static_cast<size_t>(expert));
    if (found != expected)
      throw IoError(concat(printable(experts.path(layer)), ": layer ", layer, " expert ", expert,
                           ": expected the SHA-256 ", hex(expected), ", found ", hex(found),
                           ": the file is damaged, or the disk gave other bytes than it holds"));
  };
}

int64_t checksum_bytes(const StoreDirectory& store, const EngineOptions& options) {
  return options.verify_reads ? all_experts(store.variant) * static_cast<int64_t>(sizeof(Sha256Sum)) : 0;
}

SlotCacheShape cache_shape(const StoreDirectory& store, const EngineOptions& options) {
  return {store.variant.num_layers(), store.variant.num_experts, options.expert_slots, slot_layout(store).bytes};
}

bool has_slots_for_all(const StoreDirectory& store, const EngineOptions& options) {
  return options.expert_slots == all_experts(store.variant);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

ExpertSide::ExpertSide(const StoreDirectory& store, Backend& backend, const EngineOptions& options, int64_t chunk,
                       const ReaderFactory& open)
    : backend_(backend),
      store_(store, {read_mode(store, options), open}),
      memory_(backend.allocate(slot_memory(store, options), "expert slots")),
      cache_({memory_->data(), static_cast<size_t>(options.expert_slots * store_.slot().bytes)},
             cache_shape(store, options), cache_policy(options.cache)),
      pool_(options.readers, store_.bounce()),
      loader_(store_, pool_, cache_, expert_check(store, store_, options)),
      groups_(store.variant.num_experts, chunk * store.variant.experts_per_token),
      checksums_(checksum_bytes(store, options)),
      prefetcher_(store.variant, look_ahead_mode(options.look_ahead)),
      describe_(concat(cache_.shape().slots, " expert slots, ", pool_.threads(), " readers, ",
                       store_.mode() == ReadMode::direct ? "direct" : "buffered", " reads, cache ", options.cache,
                       ", look-ahead ", options.look_ahead, options.verify_reads ? ", reads verified" : "")),
      stays_(has_slots_for_all(store, options) && cache_policy(options.cache) != CachePolicy::none),
      settled_(static_cast<size_t>(store.variant.num_layers())),
      ring_(options.ring_depth, static_cast<size_t>(store.variant.num_experts)) {
  const auto experts = static_cast<size_t>(store.variant.num_experts);
  missing_.reserve(experts);
  jobs_.reserve(experts);
  leases_.reserve(experts);
  arriving_.groups.reserve(experts);
  arriving_.leases.reserve(experts);
}

int64_t ExpertSide::slot_memory(const StoreDirectory& store, const EngineOptions& options) {
  const Variant& v = store.variant;
  const int64_t table = has_slots_for_all(store, options) ? v.num_layers() * v.num_experts * 8 : 0;
  return options.expert_slots * slot_layout(store).bytes + table;
}

int64_t ExpertSide::table_bytes(const StoreDirectory& store, const EngineOptions& options) {
  const Variant& v = store.variant;
  const SlotCacheShape shape = cache_shape(store, options);
  // missing_, jobs_, leases_ and what is arriving.
  const auto row = static_cast<int64_t>(2 * (sizeof(ExpertGroups::Group) + sizeof(Lease)) + sizeof(ExpertJob));
  return SlotCache::table_bytes(shape, cache_policy(options.cache)) +
         ExpertLoader::table_bytes(
             {shape.slots, shape.experts, static_cast<int64_t>(store.experts.pieces.size()), options.readers}) +
         ExpertGroups::table_bytes(v.num_experts, options.chunk * v.experts_per_token) + v.num_experts * row +
         DeferredRing::table_bytes(options.ring_depth, v.num_experts) + Prefetcher::table_bytes(v) +
         checksum_bytes(store, options);
}

int64_t ExpertSide::tables() const {
  const size_t bytes = (missing_.capacity() + arriving_.groups.capacity()) * sizeof(ExpertGroups::Group) +
                       (leases_.capacity() + arriving_.leases.capacity()) * sizeof(Lease) +
                       jobs_.capacity() * sizeof(ExpertJob);
  return static_cast<int64_t>(bytes) + cache_.tables() + loader_.tables() + groups_.tables() + ring_.tables() +
         prefetcher_.tables() + checksums_;
}

void ExpertSide::run(std::unique_ptr<Commands>& commands, const RoutedExpertsBlock& block, const Scratch& s, int64_t n,
                     StepStats& stats) {
  const int64_t layer = block.layer();
  if (n == 1 && !observer_ && is_resident(layer)) {
    run_resident(*commands, block, s);
    stats.expert_hits += block.per_token();
    stats.beside_seconds += lap();
    return;
  }
  const int64_t guess_rows = prefetcher_.rows(layer, n);
  const bool ahead = n == 1 && backend_.runs_ahead();
  block.record_route(*commands, s, n, guess_rows);
  if (ahead) {
    commands->mark();
    block.record_shared(*commands, s, n);
  }
  await_choice(commands, block, ahead, stats);
  const std::span<const int32_t> ids(block.room().ids.i32(), static_cast<size_t>(n * block.per_token()));
  if (observer_) observer_(layer, ids);
  groups_.assign(ids);

  sort_out(layer, stats);
  read_missing(layer, stats);
  if (guess_rows > 0) prefetcher_.propose(*block.next(), guess_rows);
  prefetcher_.begin(loader_, layer, stats);
  if (ahead) {
    record_held(*commands, block, s, stats);
    block.record_sum(*commands, s, n);
    stats.beside_seconds += lap();
    return;
  }
  block.record_shared(*commands, s, n);
  record_jobs(*commands, block, s, n);
  stats.beside_seconds += lap();
  const double waited = stats.read_wait_seconds;
  while (more_to_read() || !arriving_.groups.empty()) {
    if (more_to_read() || prefetcher_.wants_more()) make_room(commands, layer, stats);
    take_arrived(stats);
    record_jobs(*commands, block, s, n);
  }
  stats.arrived_seconds += lap() - (stats.read_wait_seconds - waited);
  block.record_sum(*commands, s, n);
  submit(commands, stats);
}

void ExpertSide::begin(int64_t n) {
  lap_ = std::chrono::steady_clock::now();
  call_ = {n, lap_, pool_.stats().busy_seconds, loader_.dropped_guess_bytes(), ring_.waits()};
}

// Seconds since it was called last.
double ExpertSide::lap() {
  const auto began = std::exchange(lap_, std::chrono::steady_clock::now());
  return std::chrono::duration<double>(lap_ - began).count();
}

// ---- Layers whose experts are all there ----------------------------------------------------------------------------

View ExpertSide::slots_of(int64_t layer) const {
  const SlotCacheShape& shape = cache_.shape();
  return {memory_.get(), shape.slots * shape.slot_bytes + layer * shape.experts * 8};
}

// Every expert is looked at until it is there, and then no more.
bool ExpertSide::is_resident(int64_t layer) {
  if (!stays_) return false;
  if (const int64_t evictions = cache_.stats().evictions; evictions != evictions_) {  // where a read had failed
    evictions_ = evictions;
    std::ranges::fill(settled_, 0);
  }
  int64_t& settled = settled_[static_cast<size_t>(layer)];
  auto* slots = reinterpret_cast<uint64_t*>(slots_of(layer).bytes());
  for (; settled < cache_.shape().experts; ++settled) {
    const int64_t slot = cache_.ready_slot(layer, settled);
    if (slot < 0) return false;
    slots[settled] = static_cast<uint64_t>(slot * cache_.shape().slot_bytes);
  }
  return true;
}

void ExpertSide::run_resident(Commands& commands, const RoutedExpertsBlock& block, const Scratch& s) {
  const RoutedExpertsBlock::Room& room = block.room();
  block.record_route(commands, s, 1, 0);
  block.record_shared(commands, s, 1);
  commands.chosen_expert_ffn({s.normed, store_.experts().hidden, store_.experts().intermediate, block.per_token(),
                              room.ids, slots_of(block.layer()), matrices(0), room.expert_scratch, room.expert_out},
                             1);
  block.record_sum(commands, s, 1);
}

// Where every expert has a slot: some more of those that nobody has asked for, so that soon all are there. Not again
// after a read has failed, for it would fail again and again.
void ExpertSide::fill_slots(StepStats& stats) {
  if (!stays_ || !backend_.runs_ahead() || cache_.stats().failures > 0) return;
  const int64_t experts = cache_.shape().experts;
  for (int64_t layer = 0; layer < store_.layers(); ++layer) {
    if (!store_.has_experts(layer) || is_resident(layer)) continue;
    for (int64_t expert = settled_[static_cast<size_t>(layer)]; expert < experts; ++expert) {
      if (cache_.contains(layer, expert)) continue;
      if (loader_.under_way() >= experts || !loader_.guess(layer, expert, 0, 1)) return;
      stats.bytes_read += store_.experts().bytes;
    }
  }
}

// ---- A device that runs ahead -------------------------------------------------------------------------------------

// The router has spoken: its choice is in the room for ids, and new commands begin.
void ExpertSide::await_choice(std::unique_ptr<Commands>& commands, const RoutedExpertsBlock& block, bool ahead,
                              StepStats& stats) {
  Ticket ticket = backend_.submit(std::move(commands));
  ++stats.submissions;
  const double waited = stats.read_wait_seconds;
  let_go(stats);
  ++stats.waits;
  // What the batch has leased must not be what this layer needs.
  if (ahead && slots() >= 2 * block.per_token()) {
    ticket.reach();
    ring_.push(std::move(ticket), leases_);
  } else {
    ticket.wait();
    leases_.clear();
  }
  commands = backend_.begin();
  stats.router_seconds += lap() - (stats.read_wait_seconds - waited);
}

// Jobs for the experts that are there, and behind a hold for those that are on their way.
void ExpertSide::record_held(Commands& commands, const RoutedExpertsBlock& block, const Scratch& s, StepStats& stats) {
  while (more_to_read()) await_slots(block.layer(), stats);
  record_jobs(commands, block, s, 1);
  if (arriving_.groups.empty()) return;
  held_ = commands.hold();
  for (size_t i = 0; i < arriving_.groups.size(); ++i) {
    const Lease& lease = arriving_.leases[i];
    jobs_.push_back({matrices(lease.slot()), arriving_.groups[i].pairs, arriving_.groups[i].count});
    leases_.push_back(cache_.share(lease));
  }
  record_jobs(commands, block, s, 1);
}

void ExpertSide::let_go(StepStats& stats) {
  if (held_ == 0) return;
  const auto start = std::chrono::steady_clock::now();
  std::exception_ptr failure;
  try {
    for (const Lease& lease : arriving_.leases) loader_.wait(lease);
  } catch (...) {
    failure = std::current_exception();
  }
  backend_.release(std::exchange(held_, 0));
  stats.read_wait_seconds += seconds_since(start);
  if (failure) std::rethrow_exception(failure);
  arriving_.leases.clear();
  arriving_.groups.clear();
}

// ---- The others -----------------------------------------------------------------------------------------------------

// Jobs for the experts that are in a slot, and lists of those that are on their way and of those that are neither.
void ExpertSide::sort_out(int64_t layer, StepStats& stats) {
  missing_.clear();
  next_missing_ = 0;
  jobs_.clear();
  prefetcher_.compare(loader_, layer, groups_.groups(), stats);
  loader_.collect();
  for (const ExpertGroups::Group& group : groups_.groups()) {
    if (!cache_.contains(layer, group.expert)) {
      missing_.push_back(group);
      continue;
    }
    SlotCache::Acquired acquired = loader_.demand(layer, group.expert);
    if (acquired.found == SlotCache::Found::ready) {
      leases_.push_back(std::move(acquired.lease));
      jobs_.push_back({matrices(leases_.back().slot()), group.pairs, group.count});
    } else {
      arriving_.leases.push_back(std::move(acquired.lease));
      arriving_.groups.push_back(group);
    }
  }
  stats.expert_hits += static_cast<int64_t>(groups_.groups().size() - missing_.size());
  stats.expert_misses += static_cast<int64_t>(missing_.size());
}

// Leases slots for missing experts, as many as have room, and has them read.
void ExpertSide::read_missing(int64_t layer, StepStats& stats) {
  if (!more_to_read()) return;
  const auto missing = static_cast<int64_t>(missing_.size() - next_missing_);
  if (cache_.spare() < missing) ring_.collect();
  if (cache_.spare() < missing) loader_.give_up_guesses();
  const int64_t count = std::min(missing, cache_.spare());
  if (count == 0) return;
  const auto under_way = static_cast<int64_t>(arriving_.groups.size()) + count;
  const int64_t parts = std::max<int64_t>(1, pool_.threads() / under_way);
  for (int64_t i = 0; i < count; ++i) {
    const ExpertGroups::Group& group = missing_[next_missing_++];
    arriving_.groups.push_back(group);
    arriving_.leases.push_back(loader_.demand(layer, group.expert, parts).lease);
    stats.bytes_read += store_.experts().bytes;
  }
}

// The oldest batch in flight gives its slots back, and they are read into.
void ExpertSide::await_slots(int64_t layer, StepStats& stats) {
  if (ring_.empty())
    throw StateError(concat("layer ", layer, ": expected a slot for an expert, found all ", slots(),
                            " leased and no batch in flight"));
  ring_.pop();
  read_missing(layer, stats);
}

// What was recorded goes on its way, so that its slots come back for experts that are still to be read, or read ahead.
// Waits for it only when nothing else is under way.
void ExpertSide::make_room(std::unique_ptr<Commands>& commands, int64_t layer, StepStats& stats) {
  if (!leases_.empty()) submit(commands, stats);
  read_missing(layer, stats);
  while (arriving_.groups.empty()) await_slots(layer, stats);
  ring_.collect();
  prefetcher_.begin(loader_, layer, stats);
}

// Jobs for experts that have arrived; waits for one when none has.
void ExpertSide::take_arrived(StepStats& stats) {
  const auto arrived = [&](const Lease& lease) { return loader_.done(lease); };
  if (std::ranges::none_of(arriving_.leases, arrived)) {
    const auto start = std::chrono::steady_clock::now();
    loader_.wait(arriving_.leases.front());
    stats.read_wait_seconds += seconds_since(start);
  }
  // All at once would leave the disk nothing to do while they compute.
  const bool room_is_wanted = more_to_read() || prefetcher_.wants_more();
  const int64_t most = room_is_wanted ? std::max<int64_t>(1, slots() / 4) : slots();
  size_t left = 0;
  for (size_t i = 0; i < arriving_.groups.size(); ++i) {
    if (static_cast<int64_t>(jobs_.size()) == most || !arrived(arriving_.leases[i])) {
      if (left != i) {
        arriving_.groups[left] = arriving_.groups[i];
        arriving_.leases[left] = std::move(arriving_.leases[i]);
      }
      ++left;
      continue;
    }
    loader_.wait(arriving_.leases[i]);
    jobs_.push_back({matrices(arriving_.leases[i].slot()), arriving_.groups[i].pairs, arriving_.groups[i].count});
    leases_.push_back(std::move(arriving_.leases[i]));
  }
  arriving_.groups.resize(left);
  arriving_.leases.resize(left);
}

void ExpertSide::record_jobs(Commands& commands, const RoutedExpertsBlock& block, const Scratch& s, int64_t n) {
  if (jobs_.empty()) return;
  commands.expert_ffn({s.normed, n, store_.experts().hidden, store_.experts().intermediate, block.per_token(), jobs_,
                       block.room().expert_scratch, block.room().expert_out});
  jobs_.clear();
}

// What was recorded goes on its way with its leases, and is not waited for.
void ExpertSide::submit(std::unique_ptr<Commands>& commands, StepStats& stats) {
  Ticket ticket = backend_.submit(std::move(commands));
  ++stats.submissions;
  commands = backend_.begin();
  ring_.push(std::move(ticket), leases_);
}

double ExpertSide::read_rate(double seconds) const {
  const ProbeRate rate = probe_reads(pieces_of(store_), pool_.threads(), seconds, std::random_device()(), [] {});
  return rate.seconds > 0 ? static_cast<double>(rate.bytes) / rate.seconds : 0;
}

void ExpertSide::finish(StepStats& stats) {
  ring_.drain();
  leases_.clear();
  loader_.collect();
  if (loader_.begun() > confirmed_) {
    try {
      store_.check_unchanged();
    } catch (...) {
      loader_.give_up();
      cache_.drop_all();
      std::ranges::fill(settled_, 0);
      throw;
    }
  }
  fill_slots(stats);
  confirmed_ = loader_.begun() - loader_.under_way();
  end_call(stats);
}

void ExpertSide::end_call(StepStats& stats) {
  const int64_t dropped = loader_.dropped_guess_bytes() - call_.dropped_bytes;
  stats.bytes_read += stats.look_ahead_reads * store_.experts().bytes - dropped;
  stats.look_ahead_wasted_bytes += (stats.look_ahead_reads - stats.look_ahead_used) * store_.experts().bytes - dropped;
  stats.waits += ring_.waits() - call_.waits;
  stats.read_busy_seconds += pool_.stats().busy_seconds - call_.busy_seconds;
  prefetcher_.add(call_.tokens, {seconds_since(call_.time), stats.read_wait_seconds, stats.read_busy_seconds}, stats);
}

void ExpertSide::abandon() noexcept {
  backend_.release(std::exchange(held_, 0));
  loader_.give_up();
  prefetcher_.forget();
  arriving_.leases.clear();
  arriving_.groups.clear();
  try {
    ring_.drain();
  } catch (...) {
    // The failure that brought us here is the one to report.
  }
  leases_.clear();
  jobs_.clear();
}

ExpertMatrices ExpertSide::matrices(int64_t slot) const {
  return expert_matrices(store_, {memory_.get(), slot * store_.slot().bytes});
}

}  // namespace moeflux
