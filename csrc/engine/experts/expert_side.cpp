#include "engine/experts/expert_side.h"

#include "core/error.h"
#include "engine/experts/overlapped_step.h"
#include "engine/experts/streamed_chunk.h"
#include "engine/experts/tiered_step.h"

namespace moeflux {
namespace {

ExpertGroups::Shape groups_shape(const Variant& v, const EngineOptions& options) {
  return {v.experts().count, options.chunk * v.experts().per_token};
}

}  // namespace

ExpertSide::ExpertSide(const StoreDirectory& store, Backend& backend, const EngineOptions& options,
                       const ReaderFactory& open)
    : backend_(backend),
      slots_(store, backend, options, open),
      prefetcher_(store.variant, options.look_ahead),
      cpu_(options.cpu_experts == CpuExperts::off ? nullptr
                                                  : std::make_unique<ExpertsOnCpu>(store, slots_, backend, options)),
      feed_(slots_, prefetcher_, cpu_.get(), store.variant.experts().count),
      picks_(groups_shape(store.variant, options)),
      resident_(slots_, store.variant.all_layers(), backend.runs_on_submit()),
      describe_(concat(slots_.describe(), ", cache ", name_of(options.cache), ", look-ahead ",
                       name_of(options.look_ahead),
                       cpu_ ? concat(", experts on the CPU ", name_of(options.cpu_experts)) : "",
                       options.verify_reads ? ", reads verified" : "")) {}

int64_t ExpertSide::planned_slots(const StoreDirectory& store, const EngineOptions& options, bool shared) {
  return ExpertSlots::planned_bytes(store, options, shared);
}

int64_t ExpertSide::planned_tables(const StoreDirectory& store, const EngineOptions& options) {
  const Variant& v = store.variant;
  return ExpertSlots::planned_tables(store, options) + Prefetcher::planned_tables(v.experts().count) +
         ExpertFeed::planned_tables(v.experts().count) + Picks::planned_tables(groups_shape(v, options));
}

int64_t ExpertSide::tables() const { return slots_.tables() + prefetcher_.tables() + feed_.tables() + picks_.tables(); }

void ExpertSide::run(Recorder& recorder, const RoutedExpertsBlock& block, const Scratch& scratch, int64_t n,
                     StepStats& stats) {
  const bool step = n == 1;
  ExpertCall call = {recorder, block, scratch, n, 0, stats, laps_};
  // If somebody wants to know what was picked, the host must look.
  if ((step || backend_.groups_chosen()) && !picks_.observed() && resident_.ready(block.layer())) {
    resident_.run(call);
    return;
  }
  call.guess_rows = prefetcher_.rows(block.layer(), n);
  if (step && backend_.runs_on_submit() && !backend_.shares_memory())
    run_tiered_step(call, picks_, feed_, slots_.count());
  else if (step && backend_.runs_on_submit())
    run_overlapped_step(call, picks_, feed_, slots_.count());
  else
    run_streamed_chunk(call, picks_, feed_);
}

bool ExpertSide::runs_alone(int64_t n) {
  return (n == 1 || backend_.groups_chosen()) && !picks_.observed() && resident_.serves_all();
}

void ExpertSide::begin(int64_t n) {
  laps_ = {};
  call_ = {n, laps_, slots_.pool().stats().busy_seconds, slots_.loader().counts()};
}

void ExpertSide::finish(StepStats& stats) {
  ExpertLoader& loader = slots_.loader();
  loader.collect();
  if (loader.counts().begun > confirmed_) check_unchanged();
  resident_.fill();
  const LoaderCounts counts = loader.counts();
  confirmed_ = counts.begun - counts.under_way;
  end_call(stats);
}

void ExpertSide::check_unchanged() {
  try {
    slots_.store().check_unchanged();
  } catch (...) {
    slots_.loader().give_up();
    slots_.drop_all();
    resident_.forget();
    throw;
  }
}

void ExpertSide::end_call(StepStats& stats) {
  const LoaderCounts counts = slots_.loader().counts();
  const int64_t dropped = counts.dropped_bytes - call_.loader.dropped_bytes;
  stats.bytes_read += counts.bytes_read - call_.loader.bytes_read;
  stats.bytes_copied += counts.bytes_copied - call_.loader.bytes_copied;
  stats.host_hits += counts.found_below - call_.loader.found_below;
  stats.look_ahead_wasted_bytes += (stats.look_ahead_reads - stats.look_ahead_used) * expert_bytes() - dropped;
  stats.read_busy_seconds += slots_.pool().stats().busy_seconds - call_.busy_seconds;
  if (call_.tokens > 0)
    prefetcher_.add(call_.tokens, {call_.time.seconds(), stats.read_wait_seconds, stats.read_busy_seconds}, stats);
}

void ExpertSide::abandon() noexcept {
  slots_.loader().give_up();
  feed_.abandon();
  resident_.forget();
}

}  // namespace moeflux
