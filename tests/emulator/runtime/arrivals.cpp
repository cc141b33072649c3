// Copies that come by themselves, as late as they may: when somebody awaits the turn of an arrival and all that it
// expects has been asked for.
#include "arrivals.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "execution.h"

namespace emulator {

constexpr uint64_t most_bytes = (1u << 20) - 1;  // that an arrival can expect

// The arrival that a kernel uses. It stops whoever has none.
static Arrival& used(Execution& execution, const void* place, const void* site) {
  Block& block = *execution.block;
  const auto found = std::ranges::find(block.arrivals, place, &Arrival::place);
  if (found == block.arrivals.end()) {
    execution.problem(__LINE__, site, "an arrival that nobody has made");
    stop(execution);
  }
  if (found->maker != execution.running->index && found->barriers == block.barriers[threadgroup_space])
    execution.problem(__LINE__, site, "an arrival that another thread has made, and no barrier in between");
  return *found;
}

static uint32_t number_of(const Block& block, const Arrival& arrival) {
  return static_cast<uint32_t>(&arrival - block.arrivals.data());
}

// The thread knows that the turn before this one is over, and what those had done who arrived in it.
static void acquire(Execution& execution, Later& of, const Arrival& arrival) {
  if (!execution.options.check) return;
  const uint32_t number = number_of(*execution.block, arrival);
  if (of.turns.size() <= number) of.turns.resize(number + 1);
  of.turns[number] = arrival.turn;
  for (const Release& release : arrival.releases_before) {
    const auto found = std::ranges::find(of.heard, release.thread, &Release::thread);
    if (found == of.heard.end())
      of.heard.push_back(release);
    else
      found->count = std::max(found->count, release.count);
  }
}

// The turn is over, for those too that wait for it.
static void complete(Execution& execution, Arrival& arrival) {
  for (const LateCopy& copy : arrival.copies) {
    memcpy(copy.to, copy.early.empty() ? copy.from : copy.early.data(), copy.bytes);
    if (execution.options.check) execution.checker.end_copy(execution, copy.to, copy.bytes, arrival.delivery);
  }
  ++arrival.turn;
  arrival.arrived = arrival.delivery = 0;
  arrival.expected = arrival.asked = 0;
  arrival.copies.clear();
  arrival.releases_before = std::exchange(arrival.releases, {});
  const uint32_t number = number_of(*execution.block, arrival);
  for (const Thread& thread : execution.threads_of(*execution.block)) {
    Later& later = execution.later[thread.index];
    if (thread.state != State::arrival || later.arrival != number || later.has_come) continue;
    later.has_come = true;
    acquire(execution, later, arrival);
  }
}

// For a thread that has something copied, or arrives. A turn is over when it has all, but whoever has not awaited it
// cannot know.
static Arrival& used_again(Execution& execution, const void* place, const void* site) {
  Arrival& arrival = used(execution, place, site);
  if (!arrival.is_complete()) return arrival;
  execution.problem(__LINE__, site, "an arrival is used again, and nobody has awaited what was to come");
  complete(execution, arrival);
  return arrival;
}

static void arrive(Execution& execution, Arrival& arrival, const void* site) {
  if (arrival.arrived == arrival.threads)
    execution.problem(__LINE__, site, "more threads arrive than the %u that were to", arrival.threads);
  ++arrival.arrived;
}

static void ask(Execution& execution, Arrival& arrival, LateCopy copy, const void* site) {
  if (execution.options.check) {
    if (!arrival.delivery)
      arrival.delivery = execution.checker.add_delivery(number_of(*execution.block, arrival), arrival.turn);
    execution.checker.begin_copy(execution, copy.to, copy.bytes, arrival.delivery, site);
  }
  arrival.copies.push_back(std::move(copy));
}

bool let_awaiting_go_on(Execution& execution) {
  Block& block = *execution.block;
  if (block.arrivals.empty()) return false;
  bool any = false;
  for (Thread& thread : execution.threads_of(block)) {
    if (thread.state != State::arrival) continue;
    const Later& later = execution.later[thread.index];
    Arrival& arrival = block.arrivals[later.arrival];
    if (!later.has_come && arrival.is_complete()) complete(execution, arrival);
    if (!later.has_come) continue;
    thread.state = State::ready;
    any = true;
  }
  return any;
}

static void report(Execution& execution, int kind, const void* site, const Arrival& arrival, const char* what) {
  execution.problem(kind, site, "%s: expected %lu bytes, %lu were copied, %u of %u threads arrived", what,
                    static_cast<unsigned long>(arrival.expected), static_cast<unsigned long>(arrival.asked),
                    arrival.arrived, arrival.threads);
}

void report_awaiting(Execution& execution, const Thread& thread) {
  const auto blocks = std::span(execution.blocks, execution.cluster);
  const auto own = std::ranges::find_if(
      blocks, [&](const Block& block) { return thread.index - block.first < execution.thread_count; });
  report(execution, __LINE__, thread.site, own->arrivals[execution.later[thread.index].arrival],
         "waits for an arrival that never comes");
}

void check_arrivals(Execution& execution) {
  for (const Block& block : std::span(execution.blocks, execution.cluster))
    for (const Arrival& arrival : block.arrivals)
      if (arrival.is_under_way())
        report(execution, __LINE__, nullptr, arrival, "the block ends before what nobody has awaited");
}

}  // namespace emulator

using namespace emulator;

#define SITE __builtin_return_address(0)

extern "C" {

void msl_make_arrivals(const uint64_t* arrivals, uint32_t count, uint32_t threads) {
  Execution& execution = of_this_fiber();
  Block& block = *execution.block;
  for (uint32_t i = 0; i < count; ++i) {
    const auto same = std::ranges::find(block.arrivals, arrivals + i, &Arrival::place);
    if (same != block.arrivals.end()) {
      execution.problem(__LINE__, SITE, "an arrival is made twice");
      stop(execution);
    }
    block.arrivals.push_back({.place = arrivals + i,
                              .threads = threads,
                              .maker = execution.running->index,
                              .barriers = block.barriers[threadgroup_space]});
    if (execution.options.check) execution.checker.hold_arrival(execution, arrivals + i, SITE);
  }
}

void msl_copy_in_bulk(void* to, const void* from, uint32_t bytes, const uint64_t* place) {
  Execution& execution = of_this_fiber();
  Arrival& arrival = used_again(execution, place, SITE);
  if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16 || bytes == 0) {
    execution.problem(__LINE__, SITE, "a copy in bulk that is not of sixteen bytes each: %u from byte %u to byte %u",
                      bytes, static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) % 16),
                      static_cast<uint32_t>(reinterpret_cast<uintptr_t>(to) % 16));
    stop(execution);
  }
  if (execution.options.check)
    execution.checker.access(execution, {reinterpret_cast<uintptr_t>(from), bytes, false, false, false, SITE});
  LateCopy copy = {to, from, bytes, {}};
  if (execution.wait) copy.early.assign(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
  arrival.asked += bytes;
  ask(execution, arrival, std::move(copy), SITE);
}

void msl_expect_bytes(const uint64_t* place, uint32_t bytes) {
  Execution& execution = of_this_fiber();
  Arrival& arrival = used_again(execution, place, SITE);
  arrival.expected += bytes;
  if (arrival.expected > most_bytes)
    execution.problem(__LINE__, SITE, "an arrival that expects %lu bytes, over the %lu that it can",
                      static_cast<unsigned long>(arrival.expected), static_cast<unsigned long>(most_bytes));
  arrival.releases.push_back({execution.running->index, ++execution.running->clock.releases});
  arrive(execution, arrival, SITE);
}

// What the thread copies by sixteen bytes comes with the arrival from now on.
void msl_arrive_with_copies(const uint64_t* place) {
  Execution& execution = of_this_fiber();
  std::deque<Copy>& copies = execution.of_running().copies;
  Arrival& arrival = used_again(execution, place, SITE);
  for (const Copy& copy : copies) {
    LateCopy late = {copy.to, copy.from, copy.bytes, {}};
    if (!copy.from) late.early.assign(copy.early, copy.early + copy.bytes);
    ask(execution, arrival, std::move(late), SITE);
  }
  copies.clear();
  arrive(execution, arrival, SITE);
}

void msl_await_arrival(const uint64_t* place, uint32_t turn) {
  Execution& execution = of_this_fiber();
  Later& later = execution.of_running();
  Arrival& arrival = used(execution, place, SITE);
  if (arrival.turn % 2 == turn % 2) {
    if (!arrival.is_complete()) {
      later.arrival = number_of(*execution.block, arrival);
      later.has_come = false;
      return WAIT_AS(State::arrival);
    }
    complete(execution, arrival);
  }
  acquire(execution, later, arrival);
}

}  // extern "C"
