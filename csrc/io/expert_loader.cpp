#include "io/expert_loader.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "core/error.h"

namespace moeflux {

// All that one layer may demand, while what was guessed for it and is no longer wanted comes to its end.
int64_t LoaderShape::loads() const { return std::min(slots, 2 * experts); }

// An expert is cut at the borders of its pieces, and into a part for each thread.
int64_t LoaderShape::requests() const { return threads + pieces; }

ExpertLoader::ExpertLoader(const ExpertStore& store, ReadPool& pool, SlotCache& cache, ExpertCheck check)
    : store_(store),
      pool_(pool),
      cache_(cache),
      check_(std::move(check)),
      shape_{cache.shape().slots, cache.shape().experts, static_cast<int64_t>(store.experts().pieces.size()),
             pool.threads()},
      by_slot_(static_cast<size_t>(cache.shape().slots)) {
  assert(cache.shape().slot_bytes >= store.slot().bytes);
  const auto loads = static_cast<size_t>(shape_.loads());
  loads_.reserve(loads);
  idle_.reserve(loads);
  guesses_.reserve(loads);
  while (loads_.size() < loads) add_load();
}

int64_t ExpertLoader::table_bytes(const LoaderShape& shape) {
  const int64_t load = static_cast<int64_t>(sizeof(Load) + 3 * sizeof(Load*)) +
                       shape.requests() * static_cast<int64_t>(sizeof(ReadRequest));
  return shape.loads() * load + shape.slots * static_cast<int64_t>(sizeof(Load*));
}

int64_t ExpertLoader::tables() const {
  size_t bytes = (loads_.capacity() + idle_.capacity() + guesses_.capacity() + by_slot_.capacity()) * sizeof(Load*);
  for (const std::unique_ptr<Load>& load : loads_) bytes += sizeof(Load) + load->batch.capacity() * sizeof(ReadRequest);
  return static_cast<int64_t>(bytes);
}

void ExpertLoader::add_load() {
  auto load = std::make_unique<Load>();
  load->batch.reserve(static_cast<size_t>(shape_.requests()));
  if (check_) load->batch.after_reading([this, load = load.get()] { check_(load->layer, load->expert, load->slot); });
  idle_.reserve(loads_.size() + 1);
  guesses_.reserve(loads_.size() + 1);
  loads_.push_back(std::move(load));
  idle_.push_back(loads_.back().get());
}

ExpertLoader::~ExpertLoader() { give_up(); }

SlotCache::Acquired ExpertLoader::demand(int64_t layer, int64_t expert, int64_t parts) {
  if (cache_.spare() == 0 && !cache_.contains(layer, expert)) give_up_guesses();
  SlotCache::Acquired acquired = cache_.acquire(layer, expert);
  if (acquired.found == SlotCache::Found::missing) begin(cache_.share(acquired.lease), false, parts);
  if (acquired.found == SlotCache::Found::loading)
    if (Load* load = load_of(acquired.lease.slot())) {
      no_guess(*load);
      load->batch.promote();
    }
  return acquired;
}

bool ExpertLoader::guess(int64_t layer, int64_t expert, int64_t keep, int64_t parts) {
  Lease lease = cache_.guess(layer, expert, keep);
  if (!lease) return false;
  begin(std::move(lease), true, std::min<int64_t>(parts, pool_.threads()));
  return true;
}

// Nothing is under way when it throws, and the lease is gone.
void ExpertLoader::begin(Lease lease, bool guess, int64_t parts) {
  if (idle_.empty()) add_load();
  Load& load = *idle_.back();
  load.batch.clear();
  load.layer = lease.layer();
  load.expert = lease.expert();
  load.slot = lease.data();
  store_.add_reads(load.layer, load.expert, load.slot, load.batch, parts);
  pool_.submit(load.batch, guess ? ReadPriority::look_ahead : ReadPriority::demand);
  ++begun_;
  idle_.pop_back();
  by_slot_[static_cast<size_t>(lease.slot())] = &load;
  load.guess = guess;
  load.lease = std::move(lease);
  if (guess) guesses_.push_back(&load);
}

void ExpertLoader::no_guess(Load& load) {
  if (std::exchange(load.guess, false)) std::erase(guesses_, &load);
}

ExpertLoader::Load* ExpertLoader::load_of(int64_t slot) const { return by_slot_[static_cast<size_t>(slot)]; }

void ExpertLoader::wait(const Lease& lease) {
  if (load_of(lease.slot())) finish(lease.slot());
  if (lease.state() != SlotState::ready)
    throw IoError(concat("layer ", lease.layer(), " expert ", lease.expert(), ": its read failed before"));
}

bool ExpertLoader::done(const Lease& lease) const {
  const Load* load = load_of(lease.slot());
  return !load || load->batch.done();
}

// Ends the load of a slot: its expert is there, or forgotten and the error thrown.
void ExpertLoader::finish(int64_t slot) {
  Load& load = *load_of(slot);
  const auto settle = [&](bool complete) {
    no_guess(load);
    complete ? cache_.loaded(load.lease) : cache_.failed(load.lease);
    by_slot_[static_cast<size_t>(slot)] = nullptr;
    idle_.push_back(&load);
    load.lease.release();
  };
  bool complete = false;
  try {
    complete = load.batch.wait();
  } catch (...) {
    settle(false);
    throw;
  }
  settle(complete);
}

void ExpertLoader::finish_quietly(int64_t slot) {
  try {
    finish(slot);
  } catch (...) {
    // The expert is forgotten, which is all that a guess or an abandoned read leaves behind.
  }
}

void ExpertLoader::dismiss(int64_t layer, int64_t expert) {
  for (Load* load : guesses_)
    if (load->layer == layer && load->expert == expert) dropped_ += load->batch.cancel();
}

void ExpertLoader::collect() {
  for (size_t i = guesses_.size(); i-- > 0;)
    if (guesses_[i]->batch.done()) finish_quietly(guesses_[i]->lease.slot());
}

void ExpertLoader::give_up_guesses() {
  for (Load* load : guesses_) dropped_ += load->batch.cancel();
  while (!guesses_.empty()) finish_quietly(guesses_.back()->lease.slot());
}

void ExpertLoader::give_up() {
  for (const std::unique_ptr<Load>& load : loads_)
    if (load->lease) {
      const int64_t dropped = load->batch.cancel();
      if (load->guess) dropped_ += dropped;
    }
  for (const std::unique_ptr<Load>& load : loads_)
    if (load->lease) finish_quietly(load->lease.slot());
}

}  // namespace moeflux
