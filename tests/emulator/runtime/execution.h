// The state of one dispatch: threads as fibers, what their simdgroups exchange, threadgroup memory, problems found. A
// block is what CUDA calls a threadgroup.
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
#include "arrivals.h"
#include "checker.h"
#include "fiber.h"

namespace emulator {

constexpr uint32_t lanes = 32;

enum class State : uint8_t {
  unbegun,  // has no call on its stack: any stack will do
  ready,
  exchange,           // waits for its simdgroup, with a value
  simdgroup_barrier,  // waits for its simdgroup
  barrier,            // waits for its threadgroup
  arrival,            // waits for copies, or for threads that arrive
  cluster,            // waits for its cluster
  finished,
};

// Sixteen bytes, or four. The shim has the same.
struct Copy {
  void* to;
  const void* from;
  uint32_t group;
  uint32_t bytes;
  alignas(16) char early[16];  // what was there, if the kernel before had not ended; `from` is null then
};

// What a thread has of a product of a warpgroup that is under way.
struct Product {
  int (*sums)[4];
  const uint8_t* columns;
  uint32_t apart;      // bytes from eight columns to the next
  uint32_t fragments;  // eight columns each
  uint32_t group;
  bool more;                 // is added to what is there
  uint8_t rows[2][32] = {};  // g and g + 8 of lane 4 g + t
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
};

// What a thread has under way, and knows of it. By itself, because threads that lie further apart are slower.
struct Later {
  // Copies to shared memory, in the order in which they were asked for. They come when the thread waits, so whoever
  // does not wait misses them.
  std::deque<Copy> copies;
  uint32_t copy_groups = 0;  // that have ended
  // Likewise.
  std::deque<Product> products;
  uint32_t product_groups = 0;
  bool has_begun_products = false;
  uint32_t arrival = 0;   // the number of the one that it waits for
  bool has_come = false;  // what it waits for there
  // For the checker: of each arrival the turns that it knows to be over, and who had arrived there.
  std::vector<uint32_t> turns;
  std::vector<Release> heard;
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

struct Block {
  uint32_t group = 0;         // its number
  uint32_t first = 0;         // thread
  uint32_t barriers[2] = {};  // passed, by Space
  char* memory = nullptr;
  uint32_t bytes = 0;  // of its memory that are taken, gaps included
  uint32_t sum = 0;    // taken
  std::vector<ThreadgroupVariable> variables;
  std::vector<Arrival> arrivals;
};

struct Execution {
  Thread threads[msl_most_threads];
  Block blocks[msl_most_blocks];  // of the cluster that runs
  uint32_t cluster = 1;           // how many there are
  Block* block = blocks;          // that runs
  Later later[msl_most_threads];
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
  uint32_t thread_count = 0;  // of a block
  uint32_t prepared = 0;      // of the first so many threads each has a stack on which a thread can begin
  uint32_t rendezvous = 0;    // so far
  bool stopped = false;       // a thread did what nothing can follow
  char* mapped = nullptr;     // where the stacks are, at a multiple of their size
  char* stacks = nullptr;
  char* threadgroup_memory = nullptr;
  uint32_t most_shared = 0;             // bytes of a block that may be taken
  uint32_t dynamic_bytes = 0;           // of `extern __shared__`
  void (*wait)(void*, bool) = nullptr;  // for the kernel before, which is `previous`; null when that has ended
  bool next_may_come = false;           // before this kernel has waited
  void* previous = nullptr;
  Checker checker;

  std::string report;
  std::set<std::pair<const void*, int>> reported;
  uint32_t problems = 0;

  Execution();
  Execution(const Execution&) = delete;
  ~Execution();

  uint32_t simdgroups() const { return (thread_count + lanes - 1) / lanes; }  // of a block
  Later& of_running() { return later[running->index]; }
  std::span<Thread> threads_of(const Block& of) { return {threads + of.first, thread_count}; }

  // Puts items in the order of this dispatch.
  void arrange(std::span<uint32_t> items);
  // Counts a problem, and writes it down unless this site had one of this kind. `@hex` stands for a place in the
  // library's code.
  [[gnu::format(printf, 4, 5)]] void problem(int kind, const void* site, const char* format, ...);
};

// Of this thread of the host.
Execution& current();

// The same where a fiber runs, and quicker: fibers ask at every exchange, and where they are checked at every load and
// store. The stacks of an execution lie at a multiple of their size, and the first word of them says whose they are.
constexpr size_t all_stacks = stack_bytes * msl_most_threads;
inline Execution& of_this_fiber() {
  const auto here = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  return **reinterpret_cast<Execution**>(here / all_stacks * all_stacks);
}

// Runs the blocks that current() holds. False when they were stopped.
bool run_cluster(Execution& execution);
// Leaves the running thread for good.
[[noreturn]] void stop(Execution& execution);
// Others go on until the thread may, which waits at this call.
void wait(Execution& execution, State state, void* site, void* frame);
#define WAIT_AS(state) wait(execution, state, __builtin_return_address(0), __builtin_frame_address(0))

// Lets those threads of the running block go on that await what has come. Whether there are any.
bool let_awaiting_go_on(Execution& execution);
// A problem: the thread awaits what cannot come any more.
void report_awaiting(Execution& execution, const Thread& thread);
// Problems: what is under way when the blocks end.
void check_arrivals(Execution& execution);
// Each thread of the dispatch gets a stack on which it can begin, if it has none yet. Other stacks are not touched,
// because few dispatches have as many threads as there are stacks.
void prepare_stacks(Execution& execution);

}  // namespace emulator
