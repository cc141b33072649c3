#include "engine/experts/feed.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "core/error.h"

namespace moeflux {

ExpertFeed::ExpertFeed(ExpertSlots& slots, Prefetcher& prefetcher, ExpertsOnCpu* cpu, int64_t experts)
    : slots_(slots), prefetcher_(prefetcher), cpu_(cpu) {
  reserve_lists(lists_, experts);
}

void ExpertFeed::begin(const ExpertCall& call, std::span<const ExpertGroups::Group> picked) {
  sort_out(call, picked);
  if (cpu_ && cpu_->serves(call)) leave_on_cpu(call);
  read_missing(call);
  if (call.guess_rows > 0) prefetcher_.propose(*call.block.next(), call.guess_rows);
  prefetcher_.begin(slots_.loader(), call.layer(), call.stats, cpu_ && call.n == 1 && cpu_->keeps_guesses());
}

void ExpertFeed::sort_out(const ExpertCall& call, std::span<const ExpertGroups::Group> picked) {
  const int64_t layer = call.layer();
  lists_.missing.clear();
  next_missing_ = 0;
  lists_.jobs.clear();
  prefetcher_.compare(slots_.loader(), layer, picked, call.stats);
  slots_.loader().collect();
  for (const ExpertGroups::Group& group : picked) {
    if (!slots_.cache().contains(layer, group.expert)) {
      lists_.missing.push_back(group);
      continue;
    }
    SlotCache::Acquired acquired = slots_.loader().demand(layer, group.expert);
    if (acquired.found == SlotCache::Found::ready)
      take(call, group, std::move(acquired.lease));
    else
      lists_.arriving.push_back({group, std::move(acquired.lease)});
  }
  call.stats.expert_hits += static_cast<int64_t>(picked.size() - lists_.missing.size());
  call.stats.expert_misses += static_cast<int64_t>(lists_.missing.size());
}

// Of the missing experts, some that are in host slots are computed there. The first ones: so it is the same experts
// that stay there, and the others that come to the device.
void ExpertFeed::leave_on_cpu(const ExpertCall& call) {
  const auto is_there = [&](const ExpertGroups::Group& group) {
    return slots_.ready_on_host(call.layer(), group.expert);
  };
  const int64_t there = std::ranges::count_if(lists_.missing, is_there);
  const auto others = static_cast<int64_t>(lists_.arriving.size() + lists_.missing.size()) - there;
  int64_t left = cpu_->share(there, others);
  call.stats.experts_on_cpu += left;
  call.stats.host_hits += left;
  std::erase_if(lists_.missing, [&](const ExpertGroups::Group& group) {
    if (left == 0 || !is_there(group)) return false;
    --left;
    cpu_->add(call, group, slots_.lease_on_host(call.layer(), group.expert));
    return true;
  });
  cpu_->begin();
}

void ExpertFeed::take(const ExpertCall& call, const ExpertGroups::Group& group, Lease lease) {
  lists_.jobs.push_back({slots_.matrices(call.layer(), lease.slot()), group.pairs, group.count, group.expert});
  call.recorder.keep(std::move(lease));
}

// Leases slots for as many missing experts as have room, and begins their reads.
void ExpertFeed::read_missing(const ExpertCall& call) {
  if (!more_to_read()) return;
  SlotCache& cache = slots_.cache();
  const auto missing = static_cast<int64_t>(lists_.missing.size() - next_missing_);
  if (cache.spare() < missing) call.recorder.collect();
  if (cache.spare() < missing) slots_.loader().give_up_guesses();
  const int64_t count = std::min(missing, cache.spare());
  if (count == 0) return;
  const auto under_way = static_cast<int64_t>(lists_.arriving.size()) + count;
  const int64_t parts = std::max<int64_t>(1, slots_.pool().threads() / under_way);
  for (int64_t i = 0; i < count; ++i) {
    const ExpertGroups::Group& group = lists_.missing[next_missing_++];
    lists_.arriving.push_back({group, slots_.loader().demand(call.layer(), group.expert, parts).lease});
  }
  slots_.loader().begin_copies();
}

// Takes back the slots of the oldest batch in flight, and reads into them.
void ExpertFeed::await_slots(const ExpertCall& call) {
  if (!call.recorder.in_flight())
    throw StateError(concat("layer ", slots_.store().number(call.layer()),
                            ": expected a slot for an expert, found all ", slots_.count(),
                            " leased and no batch in flight"));
  call.recorder.pop();
  read_missing(call);
}

void ExpertFeed::make_room(const ExpertCall& call) {
  if (call.recorder.keeps_any()) call.recorder.defer(call.recorder.submit());
  read_missing(call);
  while (lists_.arriving.empty()) await_slots(call);
  call.recorder.collect();
  prefetcher_.begin(slots_.loader(), call.layer(), call.stats);
}

void ExpertFeed::ask_for_all(const ExpertCall& call) {
  while (more_to_read()) await_slots(call);
}

void ExpertFeed::take_arrived(const ExpertCall& call) {
  const auto arrived = [&](const Arriving& each) { return slots_.loader().done(each.lease); };
  if (std::ranges::none_of(lists_.arriving, arrived)) {
    const Stopwatch watch;
    slots_.loader().wait(lists_.arriving.front().lease);
    call.stats.read_wait_seconds += watch.seconds();
  }
  // If all were computed at once, the disk would be idle meanwhile.
  const int64_t batch = wants_room() ? std::max<int64_t>(1, slots_.count() / 4) : slots_.count();
  size_t left = 0;
  for (size_t i = 0; i < lists_.arriving.size(); ++i) {
    Arriving& each = lists_.arriving[i];
    if (static_cast<int64_t>(lists_.jobs.size()) == batch || !arrived(each)) {
      if (left != i) lists_.arriving[left] = std::move(each);
      ++left;
      continue;
    }
    slots_.loader().wait(each.lease);
    take(call, each.group, std::move(each.lease));
  }
  lists_.arriving.resize(left);
}

void ExpertFeed::take_promised(const ExpertCall& call) {
  const auto is_copied = [&](const Arriving& each) { return slots_.loader().is_copied(each.lease); };
  if (std::ranges::all_of(lists_.arriving, is_copied)) {
    for (const Arriving& each : lists_.arriving) call.commands().after(slots_.copy_to(each.lease));
  } else {
    call.recorder.hold();
    holds_for_reads_ = true;
  }
  for (const Arriving& each : lists_.arriving) take(call, each.group, slots_.cache().share(each.lease));
}

void ExpertFeed::let_go(Recorder& recorder, StepStats& stats) {
  const bool holds_for_reads = std::exchange(holds_for_reads_, false);
  if (cpu_ && cpu_->any()) {
    cpu_->finish();
    if (!holds_for_reads) recorder.release();
  }
  if (!arriving()) return;
  const Stopwatch watch;
  std::exception_ptr failure;
  try {
    for (const Arriving& each : lists_.arriving) slots_.loader().wait(each.lease);
  } catch (...) {
    failure = std::current_exception();
  }
  if (recorder.holds()) recorder.release();
  stats.read_wait_seconds += watch.seconds();
  if (failure) std::rethrow_exception(failure);
  lists_.arriving.clear();
}

void ExpertFeed::record_experts(const ExpertCall& call) {
  if (lists_.jobs.empty()) return;
  call.block.record_experts(call.commands(), call.scratch, call.n, slots_.store().experts(call.layer()), lists_.jobs);
  lists_.jobs.clear();
}

void ExpertFeed::record_x(const ExpertCall& call) {
  if (cpu_ && cpu_->serves(call)) cpu_->record_x(call);
}

void ExpertFeed::record_places(const ExpertCall& call) {
  if (lists_.jobs.empty() && lists_.arriving.empty()) return;
  const Mirrored table = slots_.table(call.layer());
  const ExpertMatrices first = slots_.matrices(call.layer(), 0);
  const SlotCacheShape& shape = slots_.cache().shape();
  auto* places = table.values<uint64_t>();
  for (const ExpertJob& job : lists_.jobs)
    places[job.index] = static_cast<uint64_t>(job.expert.gate.weight.offset - first.gate.weight.offset);
  for (const Arriving& each : lists_.arriving)
    places[each.group.expert] = static_cast<uint64_t>(each.lease.slot() * shape.slot_bytes);
  const int64_t some = lists_.jobs.empty() ? lists_.arriving.front().group.expert : lists_.jobs.front().index;
  if (cpu_)
    for (const int64_t expert : cpu_->experts()) places[expert] = places[some];
  table.upload(call.commands(), shape.experts * 8);
}

void ExpertFeed::record_chosen(const ExpertCall& call) {
  if (lists_.jobs.empty() && lists_.arriving.empty()) return;
  if (arriving()) take_promised(call);
  lists_.jobs.clear();
  call.block.record_chosen(call.commands(), call.scratch, call.n, slots_.store().experts(call.layer()),
                           slots_.table(call.layer()).device, slots_.matrices(call.layer(), 0));
}

void ExpertFeed::record_from_cpu(const ExpertCall& call) {
  if (!cpu_ || !cpu_->any()) return;
  call.recorder.hold();
  cpu_->record_outputs(call);
}

void ExpertFeed::abandon() {
  if (cpu_) cpu_->finish();
  holds_for_reads_ = false;
  prefetcher_.forget();
  lists_.arriving.clear();
  lists_.jobs.clear();
}

}  // namespace moeflux
