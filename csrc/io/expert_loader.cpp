#include "io/expert_loader.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "core/error.h"
#include "io/lower_slots.h"

namespace moeflux {

// There is room for all that one layer may demand while guesses for it that were wrong come to their end.
int64_t LoaderShape::loads() const { return std::min(slots, 2 * experts); }

// An expert is cut at the borders of its pieces, and into a part for each thread.
int64_t LoaderShape::requests() const { return threads + pieces; }

LoaderCounts& LoaderCounts::operator+=(const LoaderCounts& other) {
  begun += other.begun;
  under_way += other.under_way;
  bytes_read += other.bytes_read;
  dropped_bytes += other.dropped_bytes;
  found_below += other.found_below;
  bytes_copied += other.bytes_copied;
  return *this;
}

ExpertLoader::ExpertLoader(const ExpertStore& store, ReadPool& pool, SlotCache& cache, ExpertCheck check,
                           LowerSlots* lower)
    : store_(store),
      pool_(pool),
      cache_(cache),
      check_(std::move(check)),
      shape_{cache.shape().slots, cache.shape().experts, static_cast<int64_t>(store.largest().pieces.size()),
             pool.threads()},
      lower_(lower) {
  assert(cache.shape().slot_bytes >= store.slot().bytes);
  reserve_lists(lists_, shape_);
  lists_.by_slot.resize(static_cast<size_t>(shape_.slots));
  for (int64_t i = 0; i < shape_.loads(); ++i) add_load();
  if (lower_) cache_.watch([this](int64_t layer, int64_t expert) { lower_->set_above(layer, expert, false); });
}

bool ExpertLoader::has(int64_t layer, int64_t expert) const {
  return cache_.contains(layer, expert) || (lower_ && lower_->has(layer, expert));
}

bool ExpertLoader::needs_no_guess(int64_t layer, int64_t expert) const {
  return cache_.contains(layer, expert) || (lower_ && lower_->has(layer, expert) && !lower_->ready(layer, expert));
}

LoaderCounts ExpertLoader::counts() const {
  LoaderCounts counts = counts_;
  if (lower_) counts += lower_->loader().counts();
  return counts;
}

int64_t ExpertLoader::planned_tables(const LoaderShape& shape) {
  return planned_bytes<Lists>(shape) + shape.loads() * load_bytes(static_cast<size_t>(shape.requests()));
}

int64_t ExpertLoader::tables() const {
  int64_t bytes = held_bytes(lists_, shape_);
  for (const std::unique_ptr<Load>& load : lists_.loads) bytes += load_bytes(load->batch.capacity());
  return bytes;
}

void ExpertLoader::add_load() {
  auto load = std::make_unique<Load>();
  load->batch.reserve(static_cast<size_t>(shape_.requests()));
  if (check_) load->batch.after_reading([this, load = load.get()] { check_(load->layer, load->expert, load->slot); });
  lists_.idle.reserve(lists_.loads.size() + 1);
  lists_.guesses.reserve(lists_.loads.size() + 1);
  lists_.loads.push_back(std::move(load));
  lists_.idle.push_back(lists_.loads.back().get());
}

ExpertLoader::~ExpertLoader() {
  give_up();
  cache_.watch({});
}

SlotCache::Acquired ExpertLoader::demand(int64_t layer, int64_t expert, int64_t parts) {
  if (cache_.spare() == 0 && !cache_.contains(layer, expert)) give_up_guesses();
  const bool is_below = lower_ && lower_->has(layer, expert);
  SlotCache::Acquired acquired = cache_.acquire(layer, expert);
  if (acquired.found == SlotCache::Found::missing) {
    begin(cache_.share(acquired.lease), false, parts);
    counts_.found_below += is_below;
  }
  if (acquired.found == SlotCache::Found::loading)
    if (Load* load = load_of(acquired.lease.slot())) {
      no_guess(*load);
      load->batch.promote();
    }
  return acquired;
}

bool ExpertLoader::guess(int64_t layer, int64_t expert, int64_t keep, int64_t parts) {
  if (lower_ && !lower_->ready(layer, expert))
    return !has(layer, expert) && lower_->loader().guess(layer, expert, keep, parts);
  Lease lease = cache_.guess(layer, expert, keep);
  if (!lease) return false;
  begin(std::move(lease), true, std::min<int64_t>(parts, pool_.threads()));
  return true;
}

void ExpertLoader::begin_copies() {
  if (lower_) lower_->begin_copies();
}

// When it throws, nothing is under way and the lease is gone.
void ExpertLoader::begin(Lease lease, bool guess, int64_t parts) {
  if (lists_.idle.empty()) add_load();
  Load& load = *lists_.idle.back();
  load.batch.clear();
  load.layer = lease.layer();
  load.expert = lease.expert();
  load.slot = lease.landing();
  const int64_t bytes = store_.experts(load.layer).bytes;
  load.from_below = lower_ && lower_->bring(load.layer, load.expert, lease.slot(), parts);
  if (load.from_below) {
    counts_.bytes_copied += bytes;
  } else {
    store_.add_reads(load.layer, load.expert, load.slot, load.batch, parts);
    pool_.submit(load.batch, guess ? ReadPriority::look_ahead : ReadPriority::demand);
    ++counts_.begun;
    ++counts_.under_way;
    counts_.bytes_read += bytes;
  }
  lists_.idle.pop_back();
  lists_.by_slot[static_cast<size_t>(lease.slot())] = &load;
  load.guess = guess;
  load.lease = std::move(lease);
  if (guess) lists_.guesses.push_back(&load);
}

void ExpertLoader::no_guess(Load& load) {
  if (std::exchange(load.guess, false)) std::erase(lists_.guesses, &load);
}

ExpertLoader::Load* ExpertLoader::load_of(int64_t slot) const { return lists_.by_slot[static_cast<size_t>(slot)]; }

void ExpertLoader::wait(const Lease& lease) {
  if (load_of(lease.slot())) finish(lease.slot());
  if (lease.state() != SlotState::ready)
    throw IoError(
        concat("layer ", store_.number(lease.layer()), " expert ", lease.expert(), ": its read failed before"));
}

bool ExpertLoader::done(const Lease& lease) const {
  const Load* load = load_of(lease.slot());
  return !load || is_over(*load);
}

bool ExpertLoader::is_copied(const Lease& lease) const {
  const Load* load = load_of(lease.slot());
  return load && load->from_below && lower_->copies(lease.slot());
}

bool ExpertLoader::is_over(const Load& load) const {
  return load.from_below ? lower_->done(load.lease.slot()) : load.batch.done();
}

// Waits for a load. Whether the whole expert has come; throws what went wrong.
bool ExpertLoader::complete(Load& load) {
  if (!load.from_below) {
    --counts_.under_way;
    return load.batch.wait();
  }
  lower_->wait(load.lease.slot());
  if (check_) check_(load.layer, load.expert, load.slot);
  return true;
}

// Ends the load of a slot. Its expert is there, or is forgotten and the error thrown.
void ExpertLoader::finish(int64_t slot) {
  Load& load = *load_of(slot);
  const auto settle = [&](bool has_come) {
    no_guess(load);
    if (load.lease.state() == SlotState::loading) has_come ? cache_.loaded(load.lease) : cache_.failed(load.lease);
    if (has_come && load.from_below) lower_->set_above(load.layer, load.expert, true);
    lists_.by_slot[static_cast<size_t>(slot)] = nullptr;
    lists_.idle.push_back(&load);
    load.lease.release();
  };
  bool has_come = false;
  try {
    has_come = complete(load);
  } catch (...) {
    settle(false);
    throw;
  }
  settle(has_come);
}

void ExpertLoader::finish_quietly(int64_t slot) {
  try {
    finish(slot);
  } catch (...) {
    // Only a guess or an abandoned read comes here: it is enough that the expert is forgotten.
  }
}

// Gives up what has not begun of its reads. Returns the bytes of that.
int64_t ExpertLoader::drop(Load& load) {
  const int64_t dropped = load.batch.cancel();
  if (load.guess) counts_.dropped_bytes += dropped, counts_.bytes_read -= dropped;
  return dropped;
}

void ExpertLoader::dismiss(int64_t layer, int64_t expert) {
  if (lower_) lower_->loader().dismiss(layer, expert);
  for (Load* load : lists_.guesses)
    if (load->layer == layer && load->expert == expert)
      if (drop(*load)) {
        // Its slot will never hold the whole expert. So nobody may find the expert there while its last read ends.
        cache_.failed(load->lease);
      }
}

void ExpertLoader::collect() {
  if (lower_) lower_->loader().collect();
  for (size_t i = lists_.guesses.size(); i-- > 0;)
    if (is_over(*lists_.guesses[i])) finish_quietly(lists_.guesses[i]->lease.slot());
}

void ExpertLoader::give_up_guesses() {
  for (Load* load : lists_.guesses) drop(*load);
  while (!lists_.guesses.empty()) finish_quietly(lists_.guesses.back()->lease.slot());
}

void ExpertLoader::give_up() {
  if (lower_) lower_->loader().give_up();
  for (const std::unique_ptr<Load>& load : lists_.loads)
    if (load->lease) drop(*load);
  for (const std::unique_ptr<Load>& load : lists_.loads)
    if (load->lease) finish_quietly(load->lease.slot());
}

}  // namespace moeflux
