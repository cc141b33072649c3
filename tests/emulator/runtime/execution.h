// The state of one dispatch: threads as fibers, what their simdgroups exchange, threadgroup memory, problems found.
#pragma once
#include <cstdint>
#include <deque>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "abi.h"
#include "checker.h"

namespace emulator {

constexpr uint32_t lanes = 32;

enum class State : uint8_t {
  unbegun,  // has no call on its stack: any stack will do
  ready,
  exchange,           // waits for its simdgroup, with a value
  simdgroup_barrier,  // waits for its simdgroup
  barrier,            // waits for its threadgroup
  finished,
};

// Sixteen bytes. The shim has the same.
struct Copy {
  void* to;
  const void* from;
  uint32_t group;
  uint32_t bytes;
  alignas(16) char early[16];  // what was there, if the kernel before had not ended; `from` is null then
};

// What a rendezvous needs comes first, in one line of the CPU's cache.
struct alignas(64) Thread {
  void* stack_pointer = nullptr;
  char* stack_top = nullptr;
  void* site = nullptr;  // the call it waits at
  char value[16] = {};   // that it brings to an exchange
  uint32_t depth = 0;    // of its stack there
  uint32_t flags = 0;    // of the barrier it waits at
  uint32_t lane = 0;
  uint32_t simdgroup = 0;
  State state = State::unbegun;
  char* stack = nullptr;  // stack_bytes of it
  uint32_t index = 0;
  Clock clock;
  MslPlace place = {};
  // Copies to shared memory under way, in the order in which they were asked for. They come when the thread waits, so
  // whoever does not wait misses them.
  std::deque<Copy> copies;
  uint32_t copy_groups = 0;  // that have ended
};

// What the lanes of a simdgroup see after an exchange. The shim has the same two.
struct Snapshot {
  uint32_t mask;
  char value[lanes][16];
  const void* folded_by;  // what has made one value of all of them; null: nothing yet
  char folded[16];
};
struct Exchanged {
  Snapshot* snapshot;
  uint64_t lane;
};

struct ThreadgroupVariable {
  uint32_t id;
  char* place;
};

struct Execution {
  Thread threads[msl_most_threads];
  Snapshot snapshots[msl_most_threads / lanes];
  void* buffers[msl_buffers] = {};
  void* scheduler_stack = nullptr;
  Thread* running = nullptr;
  uint32_t first = 0;          // thread of the simdgroup that runs
  uint32_t round[lanes] = {};  // of its threads, who goes on one after the other
  uint32_t round_count = 0;
  uint32_t round_at = 0;  // of those that had no turn yet, the first
  uint32_t alike = 0;     // of those that had theirs, how many wait as the first does
  const MslKernel* kernel = nullptr;
  MslOptions options = {};
  std::mt19937 random;
  uint32_t group = 0;  // that runs
  uint32_t thread_count = 0;
  uint32_t prepared = 0;      // of the first so many threads each has a stack on which a thread can begin
  uint32_t rendezvous = 0;    // so far
  uint32_t barriers[2] = {};  // passed by the group, by Space
  bool stopped = false;       // a thread did what nothing can follow
  char* mapped = nullptr;     // where the stacks are, at a multiple of their size
  char* stacks = nullptr;
  char* threadgroup_memory = nullptr;
  uint32_t threadgroup_bytes = 0;       // taken, gaps included
  uint32_t threadgroup_sum = 0;         // taken
  uint32_t most_shared = 0;             // that may be
  uint32_t dynamic_bytes = 0;           // of `extern __shared__`
  void (*wait)(void*, bool) = nullptr;  // for the kernel before, which is `previous`; null when that has ended
  bool next_may_come = false;           // before this kernel has waited
  void* previous = nullptr;
  std::vector<ThreadgroupVariable> variables;
  Checker checker;

  std::string report;
  std::set<std::pair<const void*, int>> reported;
  uint32_t problems = 0;

  Execution();
  Execution(const Execution&) = delete;
  ~Execution();

  // Puts items in the order of this dispatch.
  void arrange(std::span<uint32_t> items);
  // Counts a problem, and writes it down unless this site had one of this kind. `@hex` stands for a place in the
  // library's code.
  [[gnu::format(printf, 4, 5)]] void problem(int kind, const void* site, const char* format, ...);
};

// Of this thread of the host.
Execution& current();

// Runs the threadgroup that current() holds. False when it was stopped.
bool run_threadgroup(Execution& execution);
// Leaves the running thread for good.
[[noreturn]] void stop(Execution& execution);
// Each thread of the dispatch gets a stack on which it can begin, if it has none yet. Other stacks are not touched,
// because few dispatches have as many threads as there are stacks.
void prepare_stacks(Execution& execution);

}  // namespace emulator
