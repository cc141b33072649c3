// The stand-in for NVIDIA's driver: how it behaves and what it has seen, which tests set and ask by ctypes.
#pragma once
#include <stddef.h>
#include <stdint.h>

extern "C" {

struct CudaEmulation {
  uint32_t order;          // of threads: MslOptions::order
  uint32_t delay;          // microseconds before a stream goes on with what it was given
  int64_t fail_at;         // the call, from 0, that fails; -1: none
  int32_t fail_with;       // how
  char fail_in[40];        // which calls count; empty: all that may fail
  int64_t fault_at;        // the kernel, from 0, that breaks off, and the context with it; -1: none
  uint64_t memory;         // bytes of the device
  int32_t driver_version;  // 12040 is 12.4
  int32_t devices;
  int32_t major, minor;  // compute capability
  int32_t multiprocessors;
  bool checked;         // every load and store of kernels
  char check_only[40];  // of those whose names begin so; empty: of all
};
// Counts calls and kernels from 0 again. A broken context is whole again, as in a new process.
void cuda_emulate(const CudaEmulation* how);

int64_t cuda_calls();  // that may fail, of those that count
int64_t cuda_launches();
int64_t cuda_graph_launches();
// Allocations, streams, events, modules, graphs and contexts that somebody still holds.
int64_t cuda_live_objects();
int64_t cuda_device_bytes();

// Writes the path of the kernel library made of this text for an architecture ("sm_90a") into `answer`, or the
// compiler's words; true for a path.
typedef bool (*CudaBuild)(const char* text, const char* architecture, bool checked, char* answer, size_t room);
void nvrtc_build_with(CudaBuild build);

}  // extern "C"
