// The part of NVIDIA's driver API and of NVRTC that moeflux uses: names, types and values as in cuda.h and nvrtc.h,
// declared here so that no toolkit is needed to build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace moeflux::cuda {

using Result = int;  // CUresult
constexpr Result success = 0;
constexpr Result error_out_of_memory = 2;
constexpr Result error_no_device = 100;
constexpr Result error_invalid_image = 200;
constexpr Result error_no_binary_for_gpu = 209;
constexpr Result error_unsupported_ptx_version = 222;
constexpr Result error_not_ready = 600;

using DeviceNumber = int;  // CUdevice
using Address = uint64_t;  // CUdeviceptr
using ContextHandle = struct ContextOfDriver*;
using ModuleHandle = struct ModuleOfDriver*;
using FunctionHandle = struct FunctionOfDriver*;
using StreamHandle = struct StreamOfDriver*;
using EventHandle = struct EventOfDriver*;
using GraphHandle = struct GraphOfDriver*;
using GraphNodeHandle = struct GraphNodeOfDriver*;
using GraphExecHandle = struct GraphExecOfDriver*;

// CUdevice_attribute
constexpr int attribute_max_threads = 1;
constexpr int attribute_multiprocessors = 16;
constexpr int attribute_l2_bytes = 38;
constexpr int attribute_major = 75;
constexpr int attribute_minor = 76;
constexpr int attribute_shared_bytes_of_multiprocessor = 81;
constexpr int attribute_same_pinned_address = 91;    // as the host's, of memory that was there before it was pinned
constexpr int attribute_shared_bytes_of_block = 97;  // for those that ask for more than usual

constexpr int function_shared_bytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

constexpr unsigned host_alloc_portable = 1;
constexpr unsigned host_alloc_mapped = 2;
constexpr unsigned pin_portable = 1;  // CU_MEMHOSTREGISTER_PORTABLE
constexpr unsigned pin_mapped = 2;    // CU_MEMHOSTREGISTER_DEVICEMAP
constexpr unsigned stream_non_blocking = 1;
constexpr unsigned event_blocking_sync = 1;
constexpr unsigned event_no_timing = 2;

// CUDA_KERNEL_NODE_PARAMS_v1
struct KernelNodeParams {
  FunctionHandle function;
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  void** kernel_params;
  void** extra;
};

// CUgraphEdgeData: of what a node has to wait for.
struct GraphEdge {
  uint8_t from_port;
  uint8_t to_port;
  uint8_t type;
  uint8_t reserved[5];
};
// CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC and CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC: the next kernel may come before
// this one has ended, and waits by itself.
constexpr GraphEdge programmatic_edge = {1, 0, 1, {}};

// CUmemcpyAttributes, of copies that begin together
struct CopyAttributes {
  struct Place {
    int type;
    int number;
  };
  int access_order;
  Place from;  // hints
  Place to;
  unsigned flags;
};
constexpr int access_in_stream_order = 1;  // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
constexpr int driver_of_batches = 13000;   // as the driver says it

// call(name here, name there, type): what the driver must have.
// clang-format off
#define MOEFLUX_CUDA_DRIVER(call)                                                                                      \
  call(init, cuInit, Result(unsigned))                                                                                 \
  call(driver_version, cuDriverGetVersion, Result(int*))                                                               \
  call(error_name, cuGetErrorName, Result(Result, const char**))                                                       \
  call(error_text, cuGetErrorString, Result(Result, const char**))                                                     \
  call(device_count, cuDeviceGetCount, Result(int*))                                                                   \
  call(device, cuDeviceGet, Result(DeviceNumber*, int))                                                                \
  call(device_name, cuDeviceGetName, Result(char*, int, DeviceNumber))                                                 \
  call(device_attribute, cuDeviceGetAttribute, Result(int*, int, DeviceNumber))                                        \
  call(device_memory, cuDeviceTotalMem_v2, Result(size_t*, DeviceNumber))                                              \
  call(retain, cuDevicePrimaryCtxRetain, Result(ContextHandle*, DeviceNumber))                                         \
  call(release, cuDevicePrimaryCtxRelease_v2, Result(DeviceNumber))                                                    \
  call(push, cuCtxPushCurrent_v2, Result(ContextHandle))                                                               \
  call(pop, cuCtxPopCurrent_v2, Result(ContextHandle*))                                                                \
  call(memory_info, cuMemGetInfo_v2, Result(size_t*, size_t*))                                                         \
  call(allocate, cuMemAlloc_v2, Result(Address*, size_t))                                                              \
  call(free, cuMemFree_v2, Result(Address))                                                                            \
  call(allocate_host, cuMemHostAlloc, Result(void**, size_t, unsigned))                                                \
  call(free_host, cuMemFreeHost, Result(void*))                                                                        \
  call(pin, cuMemHostRegister_v2, Result(void*, size_t, unsigned))                                                     \
  call(unpin, cuMemHostUnregister, Result(void*))                                                                      \
  call(copy, cuMemcpyAsync, Result(Address, Address, size_t, StreamHandle))                                            \
  call(clear, cuMemsetD8Async, Result(Address, unsigned char, size_t, StreamHandle))                                   \
  call(load, cuModuleLoadData, Result(ModuleHandle*, const void*))                                                     \
  call(unload, cuModuleUnload, Result(ModuleHandle))                                                                   \
  call(function, cuModuleGetFunction, Result(FunctionHandle*, ModuleHandle, const char*))                              \
  call(set_function, cuFuncSetAttribute, Result(FunctionHandle, int, int))                                             \
  call(launch, cuLaunchKernel,                                                                                         \
       Result(FunctionHandle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, StreamHandle, void**, \
              void**))                                                                                                 \
  call(make_stream, cuStreamCreate, Result(StreamHandle*, unsigned))                                                   \
  call(end_stream, cuStreamDestroy_v2, Result(StreamHandle))                                                           \
  call(wait_stream, cuStreamSynchronize, Result(StreamHandle))                                                         \
  call(make_event, cuEventCreate, Result(EventHandle*, unsigned))                                                      \
  call(end_event, cuEventDestroy_v2, Result(EventHandle))                                                              \
  call(record_event, cuEventRecord, Result(EventHandle, StreamHandle))                                                 \
  call(hold_for_event, cuStreamWaitEvent, Result(StreamHandle, EventHandle, unsigned))                                 \
  call(query_event, cuEventQuery, Result(EventHandle))                                                                 \
  call(wait_event, cuEventSynchronize, Result(EventHandle))                                                            \
  call(make_graph, cuGraphCreate, Result(GraphHandle*, unsigned))                                                      \
  call(end_graph, cuGraphDestroy, Result(GraphHandle))                                                                 \
  call(add_kernel, cuGraphAddKernelNode,                                                                               \
       Result(GraphNodeHandle*, GraphHandle, const GraphNodeHandle*, size_t, const KernelNodeParams*))                 \
  call(make_exec, cuGraphInstantiateWithFlags, Result(GraphExecHandle*, GraphHandle, unsigned long long))              \
  call(end_exec, cuGraphExecDestroy, Result(GraphExecHandle))                                                          \
  call(set_kernel, cuGraphExecKernelNodeSetParams,                                                                     \
       Result(GraphExecHandle, GraphNodeHandle, const KernelNodeParams*))                                              \
  call(launch_graph, cuGraphLaunch, Result(GraphExecHandle, StreamHandle))

// What a newer driver has: 12.3, and 13.0.
#define MOEFLUX_CUDA_NEWER_DRIVER(call)                                                                                \
  call(add_edges, cuGraphAddDependencies_v2,                                                                           \
       Result(GraphHandle, const GraphNodeHandle*, const GraphNodeHandle*, const GraphEdge*, size_t))                  \
  call(copy_batch, cuMemcpyBatchAsync_v2,                                                                              \
       Result(const Address*, const Address*, const size_t*, size_t, const CopyAttributes*, const size_t*, size_t,     \
              StreamHandle))

// The same for NVRTC.
using Program = struct ProgramOfCompiler*;  // nvrtcProgram
#define MOEFLUX_CUDA_COMPILER(call)                                                                                    \
  call(version, nvrtcVersion, Result(int*, int*))                                                                      \
  call(error_text, nvrtcGetErrorString, const char*(Result))                                                           \
  call(architecture_count, nvrtcGetNumSupportedArchs, Result(int*))                                                    \
  call(architectures, nvrtcGetSupportedArchs, Result(int*))                                                            \
  call(make, nvrtcCreateProgram,                                                                                       \
       Result(Program*, const char*, const char*, int, const char* const*, const char* const*))                        \
  call(end, nvrtcDestroyProgram, Result(Program*))                                                                     \
  call(compile, nvrtcCompileProgram, Result(Program, int, const char* const*))                                         \
  call(log_bytes, nvrtcGetProgramLogSize, Result(Program, size_t*))                                                    \
  call(log, nvrtcGetProgramLog, Result(Program, char*))                                                                \
  call(cubin_bytes, nvrtcGetCUBINSize, Result(Program, size_t*))                                                       \
  call(cubin, nvrtcGetCUBIN, Result(Program, char*))
// clang-format on

#define MOEFLUX_CUDA_POINTER(here, there, ...) std::add_pointer_t<__VA_ARGS__> here = nullptr;

struct DriverApi {
  MOEFLUX_CUDA_DRIVER(MOEFLUX_CUDA_POINTER)
  MOEFLUX_CUDA_NEWER_DRIVER(MOEFLUX_CUDA_POINTER)  // null in an older one
};

struct CompilerApi {
  MOEFLUX_CUDA_COMPILER(MOEFLUX_CUDA_POINTER)
};

}  // namespace moeflux::cuda
