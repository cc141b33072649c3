#include "io/lower_slots.h"

#include <cassert>
#include <utility>

namespace moeflux {

LowerSlots::LowerSlots(const ExpertStore& store, ReadPool& pool, SlotCache& cache, SlotCopies& copies,
                       int64_t upper_slots, const ExpertCheck& check)
    : cache_(cache),
      copies_(copies),
      loader_(store, pool, cache, [this, check](int64_t layer, int64_t expert, const Landing& slot) {
        if (check) check(layer, expert, slot);
        was_read(slot);
      }) {
  make_lists(lists_, Shape{cache.shape().slots, upper_slots});
  lists_.wanted_by.assign(lists_.wanted_by.size(), -1);
}

int64_t LowerSlots::planned_tables(const LoaderShape& shape, int64_t upper_slots) {
  return ExpertLoader::planned_tables(shape) + planned_bytes<Lists>(Shape{shape.slots, upper_slots});
}

bool LowerSlots::bring(int64_t layer, int64_t expert, int64_t upper, int64_t parts) {
  if (!has(layer, expert) && cache_.spare() == 0) loader_.give_up_guesses();
  if (!has(layer, expert) && cache_.spare() == 0) return false;
  SlotCache::Acquired acquired = loader_.demand(layer, expert, parts);
  const int64_t lower = acquired.lease.slot();
  Arrival& coming = arrival(upper);
  assert(!coming.lease);
  coming.lease = std::move(acquired.lease);
  const std::lock_guard lock(mutex_);
  coming.is_added = false;
  assert(wanted_by(lower) < 0);
  if (acquired.found == SlotCache::Found::ready)
    add_copy(lower, upper);
  else
    wanted_by(lower) = static_cast<int32_t>(upper);
  return true;
}

// On a thread that reads, before the read counts as done.
void LowerSlots::was_read(const Landing& slot) {
  const int64_t lower = cache_.slot_at(slot);
  const std::lock_guard lock(mutex_);
  if (wanted_by(lower) < 0) return;
  add_copy(lower, wanted_by(lower));
  copies_.begin();
}

void LowerSlots::add_copy(int64_t lower, int64_t upper) {
  copies_.add(lower, upper);
  arrival(upper).is_added = true;
}

void LowerSlots::begin_copies() {
  const std::lock_guard lock(mutex_);
  copies_.begin();
}

bool LowerSlots::copies(int64_t upper) {
  const std::lock_guard lock(mutex_);
  copies_.begin();
  return arrival(upper).lease && arrival(upper).is_added;
}

bool LowerSlots::done(int64_t upper) {
  const Arrival& coming = arrival(upper);
  if (!loader_.done(coming.lease)) return false;
  const std::lock_guard lock(mutex_);
  copies_.begin();
  // What was not added has failed, or had been read before it was wanted.
  return !coming.is_added || copies_.done(upper);
}

void LowerSlots::wait(int64_t upper) {
  const Lease lease = std::move(arrival(upper).lease);
  const auto forget = [&](bool was_read) {
    const std::lock_guard lock(mutex_);
    wanted_by(lease.slot()) = -1;
    if (was_read && !arrival(upper).is_added) add_copy(lease.slot(), upper);
    copies_.begin();
    return arrival(upper).is_added;
  };
  try {
    loader_.wait(lease);
  } catch (...) {
    if (forget(false)) copies_.wait(upper);
    throw;
  }
  forget(true);
  copies_.wait(upper);
}

}  // namespace moeflux
