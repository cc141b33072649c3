// Runs a threadgroup, or the blocks of a cluster: lanes one after the other until each waits, then whoever waits
// together goes on together.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <utility>

#include "execution.h"
#include "fiber.h"

namespace emulator {

constexpr size_t threadgroup_room = 2 * msl_shared_memory;  // with the gaps between variables

constexpr uint32_t flag_of[] = {1, 2};  // of a barrier, by Space: metal::mem_flags

Execution& current() {
  static thread_local Execution execution;
  return execution;
}

// ---- Threads --------------------------------------------------------------------------------------------------------

// Of the round, the next that can go on; null when none can.
static Thread* next_turn(Execution& execution) {
  while (execution.round_at < execution.round_count) {
    Thread& thread = execution.threads[execution.round[execution.round_at++]];
    if (thread.state <= State::ready) return &thread;
  }
  return nullptr;
}

static void begin_round(Execution& execution) {
  const std::span<uint32_t> round(execution.round, execution.round_count);
  std::iota(round.begin(), round.end(), execution.first);
  execution.arrange(round);
  execution.round_at = execution.alike = 0;
}

static bool let_meet(Execution& execution);

// Null when every lane waits for the threadgroup or is done, or all is stopped. By itself, because it comes once where
// next_turn comes for every lane.
[[gnu::noinline]] static Thread* next_round(Execution& execution) {
  if (execution.stopped || !let_meet(execution)) return nullptr;
  begin_round(execution);
  return next_turn(execution);
}

// Of the simdgroup, who goes on.
static Thread* next_of_simdgroup(Execution& execution) {
  Thread* next = next_turn(execution);
  return next ? next : next_round(execution);
}

static void go_to(Execution& execution, Thread& from, Thread* next) {
  execution.running = next;
  if (next != &from) msl_switch(&from.stack_pointer, next ? next->stack_pointer : execution.scheduler_stack);
}

// From a thread that waits to the next.
static void hand_on(Execution& execution) { go_to(execution, *execution.running, next_of_simdgroup(execution)); }

// One thread of the grid after the other, for ever. One that has not begun takes the stack of one that is done.
static void thread_main() {
  for (;;) {
    Execution& execution = of_this_fiber();
    Thread& thread = *execution.running;
    thread.state = State::ready;
    execution.kernel->entry(&thread.place, execution.buffers);
    const Later& later = execution.of_running();
    if (!later.copies.empty())
      execution.problem(__LINE__, nullptr, "%zu copies to shared memory that nobody waited for", later.copies.size());
    if (!later.products.empty()) execution.problem(__LINE__, nullptr, "products that nobody waited for");
    thread.state = State::finished;
    Thread* next = next_of_simdgroup(execution);
    if (next && next->state == State::unbegun) {
      std::swap(thread.stack, next->stack);
      std::swap(thread.stack_top, next->stack_top);
      thread.stack_pointer = next->stack_pointer;
      execution.running = next;
    } else {
      go_to(execution, thread, next);
    }
  }
}

void stop(Execution& execution) {
  execution.stopped = true;
  execution.round_at = execution.round_count;
  hand_on(execution);
  __builtin_unreachable();
}

void prepare_stacks(Execution& execution) {
  const uint32_t count = execution.cluster * execution.simdgroups() * lanes;
  for (; execution.prepared < count; ++execution.prepared) {
    Thread& thread = execution.threads[execution.prepared];
    thread.stack_pointer = new_stack(thread.stack_top, thread_main);
  }
}

Execution::Execution() {
  const auto pages = [](size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::perror("emulator: mmap"), std::abort();
    return static_cast<char*>(memory);
  };
  // Twice as much as is needed has a place that is a multiple of it. Nothing is taken before it is used.
  mapped = pages(2 * all_stacks);
  stacks = mapped + (all_stacks - reinterpret_cast<uintptr_t>(mapped) % all_stacks);
  *reinterpret_cast<Execution**>(stacks) = this;
  threadgroup_memory = pages(msl_most_blocks * threadgroup_room);
  for (uint32_t i = 0; i < msl_most_blocks; ++i) blocks[i].memory = threadgroup_memory + i * threadgroup_room;
  for (uint32_t i = 0; i < msl_most_threads; ++i) {
    threads[i].stack = stacks + i * stack_bytes;
    // Tops at different distances: at one distance all stacks would fight for the same lines of the CPU's cache.
    threads[i].stack_top = threads[i].stack + stack_bytes - i % 61 * 192;
  }
}

Execution::~Execution() {
  munmap(mapped, 2 * all_stacks);
  munmap(threadgroup_memory, msl_most_blocks * threadgroup_room);
}

void Execution::arrange(std::span<uint32_t> items) {
  if (options.order == 1) std::reverse(items.begin(), items.end());
  if (options.order > 1) std::shuffle(items.begin(), items.end(), random);
}

void Execution::problem(int kind, const void* site, const char* format, ...) {
  ++problems;
  if (reported.size() > 40 || !reported.insert({site, kind}).second) return;
  char text[600];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  char place[32] = "";
  if (site) snprintf(place, sizeof place, " at @%lx", static_cast<unsigned long>(checker.offset(site)));
  report += std::string(kernel->name) + place + ": " + text + "\n";
}

// ---- Rendezvous -----------------------------------------------------------------------------------------------------

static bool waits_for_simdgroup(const Thread& thread) {
  return thread.state == State::exchange || thread.state == State::simdgroup_barrier;
}

// Of the lanes that wait for their simdgroup, those that wait at one call, a bit for each: the innermost, as hardware
// comes together again. 0 when none waits, and while a lane waits for an arrival: it will come to this call, too.
static uint32_t meeting(const Execution& execution, uint32_t begin, uint32_t end) {
  if (execution.alike == lanes && waits_for_simdgroup(execution.threads[begin])) return ~0u;
  const Thread* leader = nullptr;
  uint32_t met = 0;
  for (uint32_t i = begin; i < end; ++i) {
    const Thread& thread = execution.threads[i];
    if (thread.state == State::arrival) return 0;
    if (!waits_for_simdgroup(thread)) continue;
    if (leader && thread.site == leader->site && thread.depth == leader->depth) {
      met |= 1u << (i - begin);
    } else if (!leader || thread.depth > leader->depth ||
               (thread.depth == leader->depth && thread.site < leader->site)) {
      leader = &thread;
      met = 1u << (i - begin);
    }
  }
  return met;
}

static void pass(Execution& execution, uint32_t begin, uint32_t met, uint32_t count) {
  const auto found = static_cast<uint32_t>(std::popcount(met));
  const Thread& first = execution.threads[begin + static_cast<uint32_t>(std::countr_zero(met))];
  Snapshot& snapshot = execution.snapshots[first.simdgroup];
  if (execution.options.strict && found != count)
    execution.problem(__LINE__, first.site, "a simdgroup operation with %u of %u lanes active", found, count);
  if (first.state == State::simdgroup_barrier && found != count) {
    const auto alive = std::count_if(execution.threads + begin, execution.threads + begin + count,
                                     [](const Thread& thread) { return thread.state != State::finished; });
    if (found != alive)
      execution.problem(__LINE__, first.site, "a simdgroup barrier reached by %u of %u live lanes", found,
                        static_cast<uint32_t>(alive));
  }
  const bool exchanges = first.state == State::exchange;
  if (exchanges) {
    snapshot.mask = met;
    snapshot.folded_by = nullptr;
  }
  ++execution.rendezvous;
  for (uint32_t lane = 0; lane < count; ++lane) {
    if (!(met >> lane & 1)) continue;
    Thread& thread = execution.threads[begin + lane];
    thread.clock.rendezvous = execution.rendezvous;
    if (exchanges) {
      memcpy(snapshot.value[lane], thread.value, sizeof thread.value);
    } else {
      for (const Space space : {device_space, threadgroup_space})
        if (thread.flags & flag_of[space]) ++thread.clock.simdgroup_barriers[space];
    }
    thread.state = State::ready;
  }
}

// Lets the lanes through that wait at one call. False when none waits.
static bool let_meet(Execution& execution) {
  const uint32_t begin = execution.first, end = begin + execution.round_count;
  const uint32_t met = meeting(execution, begin, end);
  if (!met) return false;
  pass(execution, begin, met, end - begin);
  return true;
}

// Until every lane waits for the threadgroup or is done. False when stopped.
static bool run_simdgroup(Execution& execution, uint32_t simdgroup) {
  execution.block = &execution.blocks[simdgroup / execution.simdgroups()];
  execution.first = simdgroup * lanes;
  execution.round_count = std::min(execution.thread_count - (execution.first - execution.block->first), lanes);
  begin_round(execution);
  execution.running = next_of_simdgroup(execution);
  if (execution.running) msl_switch(&execution.scheduler_stack, execution.running->stack_pointer);
  return !execution.stopped;
}

// Where every live thread of the running block waits at a barrier, lets them through. False when none is alive, or one
// waits for something else.
static bool pass_barrier(Execution& execution) {
  const std::span<Thread> threads = execution.threads_of(*execution.block);
  uint32_t finished = 0;
  const Thread* first = nullptr;
  bool mixed = false;
  for (const Thread& thread : threads) {
    if (thread.state == State::finished) {
      ++finished;
    } else {
      if (thread.state != State::barrier) return false;
      if (!first) first = &thread;
      mixed = mixed || thread.site != first->site || thread.flags != first->flags;
    }
  }
  if (!first) return false;
  if (finished)
    execution.problem(__LINE__, first->site, "divergent barrier: %u of %u threads have returned", finished,
                      execution.thread_count);
  if (mixed) execution.problem(__LINE__, first->site, "divergent barrier: threads wait at different ones");
  for (const Space space : {device_space, threadgroup_space})
    if (first->flags & flag_of[space]) ++execution.block->barriers[space];
  for (Thread& thread : threads)
    if (thread.state == State::barrier) thread.state = State::ready;
  return true;
}

// Of the cluster, every thread that is not done.
template <class Do>
static void for_each_alive(Execution& execution, Do act) {
  for (uint32_t i = 0; i < execution.cluster; ++i)
    for (Thread& thread : execution.threads_of(execution.blocks[i]))
      if (thread.state != State::finished) act(thread);
}

// Lets those threads go on that wait for their cluster, if all threads have arrived. Whether there are any.
static bool pass_cluster(Execution& execution) {
  uint8_t arrivals = 255;
  for_each_alive(execution,
                 [&](const Thread& thread) { arrivals = std::min(arrivals, thread.clock.cluster_arrivals); });
  bool any = false;
  for_each_alive(execution, [&](Thread& thread) {
    if (thread.state != State::cluster || thread.clock.cluster_awaits >= arrivals) return;
    ++thread.clock.cluster_awaits;
    thread.state = State::ready;
    any = true;
  });
  return any;
}

// Nobody goes on. A problem, if there is somebody who would.
static void check_all_ended(Execution& execution) {
  for_each_alive(execution, [&](const Thread& thread) {
    execution.stopped = true;
    if (thread.state == State::arrival) report_awaiting(execution, thread);
    if (thread.state == State::cluster)
      execution.problem(__LINE__, thread.site, "waits for a cluster of whose threads some do not arrive");
  });
  if (!execution.stopped) check_arrivals(execution);
}

// Of all blocks, lets those threads go on that wait together.
static bool let_go_on(Execution& execution) {
  bool any = false;
  for (uint32_t i = 0; i < execution.cluster; ++i) {
    execution.block = &execution.blocks[i];
    any = let_awaiting_go_on(execution) || pass_barrier(execution) || any;
  }
  if (!any && execution.cluster > 1) any = pass_cluster(execution);
  if (!any) check_all_ended(execution);
  return any;
}

bool run_cluster(Execution& execution) {
  std::array<uint32_t, msl_most_threads / lanes> room;
  const std::span<uint32_t> simdgroups(room.data(), execution.cluster * execution.simdgroups());
  do {
    std::iota(simdgroups.begin(), simdgroups.end(), 0u);
    execution.arrange(simdgroups);
    for (const uint32_t simdgroup : simdgroups)
      if (!run_simdgroup(execution, simdgroup)) return false;
  } while (let_go_on(execution));
  return !execution.stopped;
}

// ---- What kernels call ----------------------------------------------------------------------------------------------

void wait(Execution& execution, State state, void* site, void* frame) {
  Thread& thread = *execution.running;
  thread.state = state;
  thread.site = site;
  thread.depth = static_cast<uint32_t>(thread.stack_top - static_cast<char*>(frame));
  const Thread& first = execution.threads[execution.round[0]];
  execution.alike += state == first.state && site == first.site && thread.depth == first.depth;
  hand_on(execution);
}

}  // namespace emulator

using namespace emulator;

extern "C" {

Exchanged msl_exchange(const void* value, uint32_t bytes) {
  Execution& execution = of_this_fiber();
  Thread& thread = *execution.running;
  if (bytes == 4)
    memcpy(thread.value, value, 4);
  else
    memcpy(thread.value, value, bytes);
  WAIT_AS(State::exchange);
  return {&execution.snapshots[thread.simdgroup], thread.lane};
}

void msl_barrier(uint32_t flags) {
  Execution& execution = of_this_fiber();
  execution.running->flags = flags;
  WAIT_AS(State::barrier);
}

void msl_simdgroup_barrier(uint32_t flags) {
  Execution& execution = of_this_fiber();
  execution.running->flags = flags;
  WAIT_AS(State::simdgroup_barrier);
}

void msl_undefined(const char* what) { of_this_fiber().problem(__LINE__, __builtin_return_address(0), "%s", what); }

// The same place for every thread of the group. Filled with NaN, so that what was not written shows.
void* msl_threadgroup_variable(uint32_t id, uint32_t bytes, const char* name) {
  Execution& execution = of_this_fiber();
  Block& block = *execution.block;
  for (const ThreadgroupVariable& variable : block.variables)
    if (variable.id == id) return variable.place;
  constexpr uint32_t gap = 64;  // so that running over the end meets nothing
  char* place = block.memory + block.bytes + gap;
  const uint32_t rounded = (bytes + 15) / 16 * 16;
  block.bytes += gap + rounded;
  block.sum += rounded;
  if (block.sum > execution.most_shared) {
    execution.problem(__LINE__, __builtin_return_address(0), "threadgroup memory: %u bytes, over the %u that there are",
                      block.sum, execution.most_shared);
    stop(execution);
  }
  memset(place, 0xFF, bytes);
  block.variables.push_back({id, place});
  if (execution.options.check) execution.checker.add_threadgroup_variable(place, bytes, name);
  return place;
}

// What the launch asked for, in one variable.
void* msl_dynamic_memory(const char* name) {
  return msl_threadgroup_variable(~0u, of_this_fiber().dynamic_bytes, name);
}

void msl_copy_later(void* to, const void* from, uint32_t bytes) {
  Execution& execution = of_this_fiber();
  Later& later = execution.of_running();
  later.copies.push_back({to, from, later.copy_groups, bytes, {}});
  if (!execution.wait) return;
  memcpy(later.copies.back().early, from, bytes);
  later.copies.back().from = nullptr;
}
void msl_end_of_copies() { ++of_this_fiber().of_running().copy_groups; }
// The next of the copies that are not of the last `still` groups; false when there is none.
bool msl_next_copy(uint32_t still, Copy* copy) {
  Later& later = of_this_fiber().of_running();
  if (later.copies.empty() || later.copies.front().group + still >= later.copy_groups) return false;
  *copy = later.copies.front();
  later.copies.pop_front();
  return true;
}

void msl_wait_for_previous() {
  Execution& execution = of_this_fiber();
  if (execution.wait) std::exchange(execution.wait, nullptr)(execution.previous, execution.next_may_come);
}
void msl_let_next_come() { of_this_fiber().next_may_come = true; }

void msl_arrive_in_cluster() {
  Execution& execution = of_this_fiber();
  if (execution.cluster > 1) ++execution.running->clock.cluster_arrivals;
}
void msl_await_cluster() {
  Execution& execution = of_this_fiber();
  if (execution.cluster == 1) return;
  const Clock& clock = execution.running->clock;
  if (clock.cluster_awaits == clock.cluster_arrivals)
    execution.problem(__LINE__, __builtin_return_address(0), "waits for its cluster without having arrived");
  WAIT_AS(State::cluster);
}

const MslPlace* msl_place() { return &of_this_fiber().running->place; }

}  // extern "C"
