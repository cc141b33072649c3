// What a kernel library, the runtime and whoever dispatches agree on.
#pragma once
#include <stdint.h>

extern "C" {

// Where one thread of the grid is. The fields have the names of Metal's attributes.
struct MslPlace {
  uint32_t thread_position_in_grid[3];
  uint32_t threadgroup_position_in_grid[3];
  uint32_t thread_position_in_threadgroup[3];
  uint32_t threads_per_threadgroup[3];
  uint32_t threads_per_grid[3];
  uint32_t threadgroups_per_grid[3];
  uint32_t thread_index_in_threadgroup;
  uint32_t thread_index_in_simdgroup;
  uint32_t simdgroup_index_in_threadgroup;
  uint32_t simdgroups_per_threadgroup;
};

// A buffer that a kernel takes.
struct MslParameter {
  uint32_t index;
  uint32_t element_bytes;
  uint32_t alignment;
  bool read_only;
  bool is_reference;  // to one element
  const char* name;
};

struct MslKernel {
  const char* name;
  void (*entry)(const MslPlace* place, void* const* buffers);
  const MslParameter* parameters;
  uint32_t parameter_count;
  uint32_t cluster;  // blocks beside each other that run at the same time; 0: each runs by itself
};

struct MslBuffer {
  void* data;
  uint64_t bytes;
};

constexpr uint32_t msl_buffers = 31;         // that a kernel may have
constexpr uint32_t msl_most_threads = 1024;  // of a threadgroup, and of a cluster
constexpr uint32_t msl_most_blocks = 4;      // of a cluster
constexpr uint32_t msl_threadgroup_memory = 32768;
constexpr uint32_t msl_shared_memory = 232448;  // of a block in CUDA's dialect: what chips of 9.0 give

struct MslOptions {
  uint32_t order;  // of threadgroups, simdgroups and lanes: 0 ascending, 1 descending, else random with this seed
  bool check;      // every access; the library was compiled for it
  bool strict;     // also simdgroup operations that not all lanes take part in
  // Buffers are bound to the end of their memory, of which a kernel uses a part: where two of them overlap is not
  // known, unless they begin at one place.
  bool open_ended;
};

// Runs whole threadgroups. Returns the number of problems; their text is the calling thread's until it dispatches
// again.
uint32_t msl_dispatch(const MslKernel* kernel, const MslBuffer* buffers, const uint32_t* threadgroups,
                      const uint32_t* threads, const MslOptions* options);
// The same for a kernel of CUDA's dialect, which takes `params` by value. `memory` are the `count` allocations that the
// addresses in there may point to: the device's, and lists. `shared_bytes` are those of `extern __shared__`. The first
// thread that waits for the kernel before calls `wait`, unless that is null, and tells whether the kernel has let the
// next one come.
uint32_t msl_launch(const MslKernel* kernel, const void* params, const MslBuffer* memory, uint32_t count,
                    const uint32_t* blocks, const uint32_t* threads, uint32_t shared_bytes, const MslOptions* options,
                    void (*wait)(void* previous, bool next_may_come), void* previous);
const char* msl_report();

// Generated into every library. A kernel of CUDA's dialect has one parameter, whose element_bytes are those of its
// params. No thread of a kernel calls it, so nothing in it is announced to the checker.
[[gnu::no_sanitize("thread")]] const MslKernel* msl_kernels(uint32_t* count);

}  // extern "C"
