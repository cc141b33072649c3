// The entry: bindings checked, then every threadgroup in its turn.
#include <algorithm>

#include "execution.h"

namespace emulator {

static void bind(Execution& execution, const MslBuffer* buffers) {
  const MslKernel& kernel = *execution.kernel;
  std::fill(std::begin(execution.buffers), std::end(execution.buffers), nullptr);
  for (uint32_t i = 0; i < kernel.parameter_count; ++i) {
    const MslParameter& parameter = kernel.parameters[i];
    const MslBuffer& buffer = buffers[parameter.index];
    const auto address = reinterpret_cast<uintptr_t>(buffer.data);
    execution.buffers[parameter.index] = buffer.data;
    if (!buffer.data) {
      execution.problem(__LINE__, &parameter, "buffer %u, %s, is not bound", parameter.index, parameter.name);
      continue;
    }
    if (address % parameter.alignment)
      execution.problem(__LINE__, &parameter, "buffer %u, %s: its offset breaks the alignment of %u bytes",
                        parameter.index, parameter.name, parameter.alignment);
    if (parameter.is_reference && buffer.bytes < parameter.element_bytes)
      execution.problem(__LINE__, &parameter, "buffer %u, %s: %u bytes are needed, %lu are bound", parameter.index,
                        parameter.name, parameter.element_bytes, static_cast<unsigned long>(buffer.bytes));
    for (uint32_t j = 0; j < i; ++j) {
      const MslParameter& other = kernel.parameters[j];
      const auto begin = reinterpret_cast<uintptr_t>(buffers[other.index].data);
      const bool overlap = begin < address + buffer.bytes && address < begin + buffers[other.index].bytes;
      const bool apart = execution.options.open_ended && begin != address;
      if (overlap && !apart && !(parameter.read_only && other.read_only))
        execution.problem(__LINE__, &parameter,
                          "%s and %s overlap and one is written: Apple's compiler takes them to be apart", other.name,
                          parameter.name);
    }
    if (!execution.options.check) continue;
    Region region;
    region.begin = address;
    region.end = address + buffer.bytes;
    region.read_only = parameter.read_only;
    region.name = parameter.name;
    execution.checker.add_buffer(std::move(region));
  }
}

static void set(uint32_t (&to)[3], const uint32_t (&from)[3]) { std::copy(from, from + 3, to); }

// What is the same in all threadgroups.
static void place_threads(Execution& execution, Block& block, const uint32_t (&groups)[3],
                          const uint32_t (&threads)[3]) {
  for (uint32_t i = 0; i < execution.thread_count; ++i) {
    Thread& thread = execution.threads[block.first + i];
    thread.index = block.first + i;
    thread.lane = i % lanes;
    thread.simdgroup = thread.index / lanes;
    MslPlace& place = thread.place;
    set(place.thread_position_in_threadgroup,
        {i % threads[0], i / threads[0] % threads[1], i / threads[0] / threads[1]});
    set(place.threads_per_threadgroup, threads);
    set(place.threadgroups_per_grid, groups);
    for (int axis = 0; axis < 3; ++axis) place.threads_per_grid[axis] = groups[axis] * threads[axis];
    place.thread_index_in_threadgroup = i;
    place.thread_index_in_simdgroup = thread.lane;
    place.simdgroup_index_in_threadgroup = i / lanes;
    place.simdgroups_per_threadgroup = execution.simdgroups();
  }
}

static void begin_block(Execution& execution, Block& block, uint32_t number, const uint32_t (&group)[3]) {
  block.group = number;
  block.barriers[device_space] = block.barriers[threadgroup_space] = 0;
  block.bytes = block.sum = 0;
  block.variables.clear();
  block.arrivals.clear();
  for (Thread& thread : execution.threads_of(block)) {
    thread.state = State::unbegun;
    thread.clock = {};
    Later& later = execution.later[thread.index];
    later.copies.clear();
    later.products.clear();
    later.turns.clear();
    later.heard.clear();
    MslPlace& place = thread.place;
    set(place.threadgroup_position_in_grid, group);
    for (int axis = 0; axis < 3; ++axis)
      place.thread_position_in_grid[axis] =
          group[axis] * place.threads_per_threadgroup[axis] + place.thread_position_in_threadgroup[axis];
  }
}

static void run(Execution& execution, const uint32_t (&groups)[3], const uint32_t (&threads)[3]) {
  std::vector<uint32_t> order(size_t{groups[0]} / execution.cluster * groups[1] * groups[2]);
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  execution.arrange(order);
  const std::span<Block> blocks(execution.blocks, execution.cluster);
  for (Block& block : blocks) {
    block.first = static_cast<uint32_t>(&block - blocks.data()) * execution.simdgroups() * lanes;
    place_threads(execution, block, groups, threads);
  }
  prepare_stacks(execution);
  for (const uint32_t cluster : order) {
    execution.rendezvous = 0;
    execution.checker.begin_group();
    uint32_t i = cluster * execution.cluster;
    for (Block& block : blocks) {
      begin_block(execution, block, i, {i % groups[0], i / groups[0] % groups[1], i / groups[0] / groups[1]});
      ++i;
    }
    if (run_cluster(execution)) continue;
    execution.prepared = 0;  // threads were left where they were
    return;
  }
}

// Memory that a kernel of CUDA's dialect finds by address.
static void add_memory(Execution& execution, const MslBuffer& memory) {
  Region region;
  region.begin = reinterpret_cast<uintptr_t>(memory.data);
  region.end = region.begin + memory.bytes;
  region.name = "memory";
  execution.checker.add_buffer(std::move(region));
}

static Execution& prepare(const MslKernel* kernel, const MslOptions& options) {
  Execution& execution = current();
  execution.kernel = kernel;
  execution.options = options;
  if (options.order > 1) execution.random.seed(options.order);
  execution.report.clear();
  execution.reported.clear();
  execution.problems = 0;
  execution.stopped = false;
  execution.dynamic_bytes = 0;
  execution.wait = nullptr;
  execution.checker.begin_dispatch(execution);
  return execution;
}

static uint32_t run_all(Execution& execution, const uint32_t* groups, const uint32_t* threads) {
  execution.thread_count = threads[0] * threads[1] * threads[2];
  execution.cluster = std::max(execution.kernel->cluster, 1u);
  const uint32_t most = msl_most_threads / execution.cluster / lanes * lanes;
  if (execution.thread_count < 1 || execution.thread_count > most)
    execution.problem(__LINE__, nullptr, "threads of a threadgroup: 1 to %u, found %u", most, execution.thread_count);
  if (execution.cluster > msl_most_blocks || groups[0] % execution.cluster)
    execution.problem(__LINE__, nullptr, "a grid of %u blocks in clusters of %u", groups[0], execution.cluster);
  if (!execution.problems) run(execution, {groups[0], groups[1], groups[2]}, {threads[0], threads[1], threads[2]});
  return execution.problems;
}

}  // namespace emulator

using namespace emulator;

extern "C" {

__attribute__((visibility("default"))) uint32_t msl_dispatch(const MslKernel* kernel, const MslBuffer* buffers,
                                                             const uint32_t* groups, const uint32_t* threads,
                                                             const MslOptions* options) {
  Execution& execution = prepare(kernel, *options);
  execution.most_shared = msl_threadgroup_memory;
  bind(execution, buffers);
  return run_all(execution, groups, threads);
}

__attribute__((visibility("default"))) uint32_t msl_launch(const MslKernel* kernel, const void* params,
                                                           const MslBuffer* memory, uint32_t count,
                                                           const uint32_t* blocks, const uint32_t* threads,
                                                           uint32_t shared_bytes, const MslOptions* options,
                                                           void (*wait)(void* previous, bool next_may_come),
                                                           void* previous) {
  Execution& execution = prepare(kernel, *options);
  execution.most_shared = msl_shared_memory;
  execution.dynamic_bytes = shared_bytes;
  execution.wait = wait;
  execution.next_may_come = false;
  execution.previous = previous;
  const MslBuffer argument = {const_cast<void*>(params), kernel->parameters->element_bytes};
  bind(execution, &argument);
  if (options->check)
    for (uint32_t i = 0; i < count; ++i) add_memory(execution, memory[i]);
  return run_all(execution, blocks, threads);
}

__attribute__((visibility("default"))) const char* msl_report() { return current().report.c_str(); }

}  // extern "C"
