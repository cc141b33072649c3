// NVIDIA's driver API over the emulated device: the calls of csrc/cuda/driver_api.h, with the names that libcuda has.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "cuda/driver_api.h"
#include "device.h"

using namespace nvidia;
namespace api = moeflux::cuda;

namespace {

constexpr const char* magic = "moeflux stand-in cubin\n";

std::atomic<int64_t> calls = 0, launches = 0, kernels = 0, graph_launches = 0, objects = 0;
thread_local std::vector<int> contexts;  // pushed on this thread
int a_context = 0;                       // whose address is the context

constexpr api::GraphEdge ordinary_edge = {};
constexpr size_t most_relays = 4;  // kernels of a graph that are there at once

struct Node {
  Launch launch;
  bool is_behind = false;        // whether it waits for the node before it
  bool is_programmatic = false;  // and does so by itself
};
struct Graph {
  std::vector<std::unique_ptr<Node>> nodes;
};
struct Exec {
  std::vector<Node> nodes;
  std::map<const Node*, size_t> places;
};

// Whether a call is to fail, and how. Calls that give something back do not come here.
Result enter(const char* name, bool needs_context = true) {
  const CudaEmulation& how = emulation();
  if (how.fail_in[0] == 0 || std::strcmp(how.fail_in, name) == 0)
    if (calls++ == how.fail_at) return how.fail_with;
  if (needs_context && contexts.empty()) return invalid_context;
  return context_error();
}

#define ENTER(...) \
  if (const Result refused = enter(__func__ __VA_OPT__(, ) __VA_ARGS__); refused) return refused

template <typename T, typename Handle>
T* as(Handle* handle) {
  return reinterpret_cast<T*>(handle);
}

void copy_now(uint64_t to, uint64_t from, size_t bytes) {
  if (context_error()) return;
  std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
}

void run_now(const Launch& launch, Wait wait = nullptr, void* previous = nullptr) {
  if (context_error()) return;
  if (kernels++ == emulation().fault_at) return break_context("");
  run(launch, wait, previous);
}

// Kernels come as early as they may: each runs until it waits before the one before it does more than that. One that
// lets nobody come before it has waited holds up the next until those before itself have ended.
void run_chain(const std::vector<Node>& nodes) {
  static std::mutex one_at_a_time;
  static auto* relays = new std::array<Relay, most_relays>();  // a process that ends may still use them
  const std::lock_guard lock(one_at_a_time);
  size_t begun = 0;
  bool may_come = false;  // the next one, behind the last that has begun
  for (size_t i = 0; i < nodes.size(); ++i) {
    for (; begun < std::min(i + most_relays, nodes.size()); ++begun) {
      const Node& node = nodes[begun];
      if (begun > i && !(node.is_programmatic && (may_come || begun == i + 1))) break;
      may_come = (*relays)[begun % most_relays].begin(
          [&node](Wait wait, void* previous) { run_now(node.launch, wait, previous); });
    }
    (*relays)[i % most_relays].end();
  }
}

Result launch_of(const api::KernelNodeParams& params, Launch& launch) {
  auto* function = as<Function>(params.function);
  launch.function = function;
  const uint32_t grid[] = {params.grid_x, params.grid_y, params.grid_z};
  const uint32_t block[] = {params.block_x, params.block_y, params.block_z};
  std::memcpy(launch.grid, grid, sizeof grid);
  std::memcpy(launch.block, block, sizeof block);
  for (int axis = 0; axis < 3; ++axis)
    if (!grid[axis] || !block[axis] || (axis && grid[axis] > 65535)) return invalid_value;
  launch.shared_bytes = params.shared_bytes;
  if (params.shared_bytes > static_cast<unsigned>(function->shared_bytes)) return invalid_value;
  const auto* bytes = static_cast<const char*>(params.kernel_params[0]);
  launch.params.assign(bytes, bytes + function->kernel->parameters[0].element_bytes);
  return success;
}

Result add_node(api::GraphNodeHandle* handle, api::GraphHandle graph, const api::GraphNodeHandle* before, size_t count,
                std::unique_ptr<Node> node) {
  std::vector<std::unique_ptr<Node>>& nodes = as<Graph>(graph)->nodes;
  if (count > 1 || (count && (nodes.empty() || as<Node>(before[0]) != nodes.back().get()))) return invalid_value;
  node->is_behind = count == 1;
  nodes.push_back(std::move(node));
  *handle = reinterpret_cast<api::GraphNodeHandle>(nodes.back().get());
  return success;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// ---- What tests say and ask -----------------------------------------------------------------------------------------

EXPORT void cuda_emulate(const CudaEmulation* how) {
  wait_for_all_streams();
  emulation() = *how;
  calls = kernels = launches = graph_launches = 0;
  mend_context();
}
EXPORT int64_t cuda_calls() { return calls; }
EXPORT int64_t cuda_launches() { return launches; }
EXPORT int64_t cuda_graph_launches() { return graph_launches; }
EXPORT int64_t cuda_live_objects() { return objects + static_cast<int64_t>(memory().count()); }
EXPORT int64_t cuda_device_bytes() { return static_cast<int64_t>(memory().used()); }

// ---- The device -----------------------------------------------------------------------------------------------------

EXPORT Result cuInit(unsigned) { return emulation().devices ? success : no_device; }
EXPORT Result cuDriverGetVersion(int* version) { return *version = emulation().driver_version, success; }
EXPORT Result cuGetErrorName(Result result, const char** name) {
  static const std::map<int, const char*> names = {
      {1, "CUDA_ERROR_INVALID_VALUE"},   {2, "CUDA_ERROR_OUT_OF_MEMORY"},     {100, "CUDA_ERROR_NO_DEVICE"},
      {200, "CUDA_ERROR_INVALID_IMAGE"}, {201, "CUDA_ERROR_INVALID_CONTEXT"}, {500, "CUDA_ERROR_NOT_FOUND"},
      {600, "CUDA_ERROR_NOT_READY"},     {719, "CUDA_ERROR_LAUNCH_FAILED"}};
  const auto found = names.find(result);
  return *name = found == names.end() ? "CUDA_ERROR_UNKNOWN" : found->second, success;
}
EXPORT Result cuGetErrorString(Result result, const char** text) {
  if (result == launch_failed && context_error()) return *text = context_report(), success;
  return *text = result == out_of_memory ? "out of memory" : "the stand-in says so", success;
}
EXPORT Result cuDeviceGetCount(int* count) {
  ENTER(false);
  return *count = emulation().devices, success;
}
EXPORT Result cuDeviceGet(int* device, int number) {
  ENTER(false);
  return *device = number, success;
}
EXPORT Result cuDeviceGetName(char* name, int room, int) {
  ENTER(false);
  return std::strncpy(name, "an emulated NVIDIA GPU", static_cast<size_t>(room)), success;
}
static int shared_bytes_of_block() { return emulation().major == 9 ? 232448 : 101376; }
EXPORT Result cuDeviceGetAttribute(int* value, int which, int) {
  ENTER(false);
  const std::map<int, int> values = {{api::attribute_max_threads, 1024},
                                     {api::attribute_multiprocessors, emulation().multiprocessors},
                                     {api::attribute_l2_bytes, 1 << 20},
                                     {api::attribute_major, emulation().major},
                                     {api::attribute_minor, emulation().minor},
                                     {api::attribute_shared_bytes_of_multiprocessor, shared_bytes_of_block() + 1024},
                                     {api::attribute_same_pinned_address, 1},
                                     {api::attribute_shared_bytes_of_block, shared_bytes_of_block()}};
  const auto found = values.find(which);
  if (found == values.end()) return invalid_value;
  return *value = found->second, success;
}
EXPORT Result cuDeviceTotalMem_v2(size_t* bytes, int) {
  ENTER(false);
  return *bytes = emulation().memory, success;
}
EXPORT Result cuDevicePrimaryCtxRetain(api::ContextHandle* context, int) {
  ENTER(false);
  ++objects;
  return *context = reinterpret_cast<api::ContextHandle>(&a_context), success;
}
EXPORT Result cuDevicePrimaryCtxRelease_v2(int) { return --objects, success; }
EXPORT Result cuCtxPushCurrent_v2(api::ContextHandle) { return contexts.push_back(0), success; }
EXPORT Result cuCtxPopCurrent_v2(api::ContextHandle*) { return contexts.pop_back(), success; }

// ---- Memory ---------------------------------------------------------------------------------------------------------

EXPORT Result cuMemGetInfo_v2(size_t* free, size_t* total) {
  ENTER();
  *total = emulation().memory;
  return *free = *total - memory().used(), success;
}
EXPORT Result cuMemAlloc_v2(api::Address* address, size_t bytes) {
  ENTER();
  return memory().allocate(address, bytes);
}
EXPORT Result cuMemFree_v2(api::Address address) { return memory().free(address); }
EXPORT Result cuMemHostAlloc(void** address, size_t bytes, unsigned flags) {
  ENTER();
  return flags == 3 ? memory().allocate_host(address, bytes) : invalid_value;
}
EXPORT Result cuMemFreeHost(void* address) { return memory().free_host(address); }
EXPORT Result cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) {
  ENTER();
  return flags == 3 ? memory().pin(address, bytes) : invalid_value;
}
EXPORT Result cuMemHostUnregister(void* address) { return memory().unpin(address); }
EXPORT Result cuMemcpyAsync(api::Address to, api::Address from, size_t bytes, api::StreamHandle stream) {
  ENTER();
  if (!memory().holds(to, bytes) || !memory().holds(from, bytes)) return invalid_value;
  as<Stream>(stream)->add([=] { copy_now(to, from, bytes); });
  return success;
}
// One after the other, the last first: the driver promises no order.
EXPORT Result cuMemcpyBatchAsync_v2(const api::Address* to, const api::Address* from, const size_t* bytes, size_t count,
                                    const api::CopyAttributes* attributes, const size_t* first, size_t kinds,
                                    api::StreamHandle stream) {
  ENTER();
  if (kinds != 1 || *first != 0 || attributes->access_order != api::access_in_stream_order) return invalid_value;
  for (size_t i = 0; i < count; ++i)
    if (bytes[i] == 0 || !memory().holds(to[i], bytes[i]) || !memory().holds(from[i], bytes[i])) return invalid_value;
  for (size_t i = count; i-- > 0;)
    as<Stream>(stream)->add([to = to[i], from = from[i], bytes = bytes[i]] { copy_now(to, from, bytes); });
  return success;
}
EXPORT Result cuMemsetD8Async(api::Address to, unsigned char value, size_t bytes, api::StreamHandle stream) {
  ENTER();
  if (!memory().holds(to, bytes)) return invalid_value;
  as<Stream>(stream)->add([=] {
    if (!context_error()) std::memset(reinterpret_cast<void*>(to), value, bytes);
  });
  return success;
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

EXPORT Result cuModuleLoadData(api::ModuleHandle* handle, const void* image) {
  ENTER();
  const auto* text = static_cast<const char*>(image);
  if (std::strncmp(text, magic, std::strlen(magic)) != 0) return invalid_image;
  const char* path = text + std::strlen(magic);
  auto module = std::make_unique<Module>();
  const std::string library(path, std::strchr(path, '\n'));
  module->checked = library.find("-checked-") != std::string::npos;  // as tests/emulator/build.py names it
  module->library = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!module->library) return invalid_image;
  module->launch = reinterpret_cast<decltype(&msl_launch)>(dlsym(module->library, "msl_launch"));
  module->report = reinterpret_cast<decltype(&msl_report)>(dlsym(module->library, "msl_report"));
  const auto table = reinterpret_cast<decltype(&msl_kernels)>(dlsym(module->library, "msl_kernels"));
  if (!table || !module->launch || !module->report) return invalid_image;
  uint32_t count = 0;
  const MslKernel* all = table(&count);
  for (uint32_t i = 0; i < count; ++i) module->kernels[all[i].name] = &all[i];
  ++objects;
  return *handle = reinterpret_cast<api::ModuleHandle>(module.release()), success;
}
EXPORT Result cuModuleUnload(api::ModuleHandle handle) {
  wait_for_all_streams();
  delete as<Module>(handle);  // the library stays open, as the emulator's own do
  return --objects, success;
}
EXPORT Result cuModuleGetFunction(api::FunctionHandle* handle, api::ModuleHandle module, const char* name) {
  ENTER();
  auto* owner = as<Module>(module);
  const auto found = owner->kernels.find(name);
  if (found == owner->kernels.end()) return not_found;
  std::unique_ptr<Function>& function = owner->functions[name];
  if (!function) function = std::make_unique<Function>(Function{owner, found->second});
  return *handle = reinterpret_cast<api::FunctionHandle>(function.get()), success;
}
EXPORT Result cuFuncSetAttribute(api::FunctionHandle function, int which, int value) {
  ENTER();
  if (which != api::function_shared_bytes || value > shared_bytes_of_block()) return invalid_value;
  return as<Function>(function)->shared_bytes = value, success;
}
EXPORT Result cuLaunchKernel(api::FunctionHandle function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                             unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                             api::StreamHandle stream, void** params, void** extra) {
  ENTER();
  Launch launch;
  const Result result =
      launch_of({function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, params, extra}, launch);
  if (result) return result;
  ++launches;
  as<Stream>(stream)->add([launch] { run_now(launch); });
  return success;
}

// ---- Streams and events ---------------------------------------------------------------------------------------------

EXPORT Result cuStreamCreate(api::StreamHandle* stream, unsigned flags) {
  ENTER();
  if (flags != api::stream_non_blocking) return invalid_value;
  ++objects;
  return *stream = reinterpret_cast<api::StreamHandle>(new Stream()), success;
}
EXPORT Result cuStreamDestroy_v2(api::StreamHandle stream) {
  delete as<Stream>(stream);
  return --objects, success;
}
EXPORT Result cuStreamSynchronize(api::StreamHandle stream) {
  ENTER();
  as<Stream>(stream)->wait();
  return context_error();
}
EXPORT Result cuEventCreate(api::EventHandle* event, unsigned) {
  ENTER();
  ++objects;
  return *event = reinterpret_cast<api::EventHandle>(new Event()), success;
}
EXPORT Result cuEventDestroy_v2(api::EventHandle event) {
  delete as<Event>(event);
  return --objects, success;
}
EXPORT Result cuEventRecord(api::EventHandle handle, api::StreamHandle stream) {
  ENTER();
  auto* event = as<Event>(handle);
  const std::lock_guard lock(event->mutex);
  const int64_t number = ++event->recorded;
  as<Stream>(stream)->add([event, number] {
    const std::lock_guard inner(event->mutex);
    event->done = number;
    event->changed.notify_all();
  });
  return success;
}
EXPORT Result cuStreamWaitEvent(api::StreamHandle stream, api::EventHandle handle, unsigned flags) {
  ENTER();
  if (flags != 0) return invalid_value;
  auto* event = as<Event>(handle);
  const std::lock_guard lock(event->mutex);
  as<Stream>(stream)->add([event, number = event->recorded] {
    std::unique_lock inner(event->mutex);
    event->changed.wait(inner, [&] { return event->done >= number; });
  });
  return success;
}
EXPORT Result cuEventQuery(api::EventHandle handle) {
  ENTER();
  auto* event = as<Event>(handle);
  const std::lock_guard lock(event->mutex);
  return event->done < event->recorded ? not_ready : context_error();
}
EXPORT Result cuEventSynchronize(api::EventHandle handle) {
  ENTER();
  auto* event = as<Event>(handle);
  std::unique_lock lock(event->mutex);
  event->changed.wait(lock, [event, number = event->recorded] { return event->done >= number; });
  return context_error();
}

// ---- Graphs ---------------------------------------------------------------------------------------------------------

EXPORT Result cuGraphCreate(api::GraphHandle* graph, unsigned) {
  ENTER();
  ++objects;
  return *graph = reinterpret_cast<api::GraphHandle>(new Graph()), success;
}
EXPORT Result cuGraphDestroy(api::GraphHandle graph) {
  delete as<Graph>(graph);
  return --objects, success;
}
EXPORT Result cuGraphAddKernelNode(api::GraphNodeHandle* handle, api::GraphHandle graph,
                                   const api::GraphNodeHandle* before, size_t count,
                                   const api::KernelNodeParams* params) {
  ENTER();
  auto node = std::make_unique<Node>();
  if (const Result result = launch_of(*params, node->launch)) return result;
  return add_node(handle, graph, before, count, std::move(node));
}
EXPORT Result cuGraphAddDependencies_v2(api::GraphHandle graph, const api::GraphNodeHandle* from,
                                        const api::GraphNodeHandle* to, const api::GraphEdge* edges, size_t count) {
  ENTER();
  const std::vector<std::unique_ptr<Node>>& nodes = as<Graph>(graph)->nodes;
  for (size_t i = 0; i < count; ++i) {
    const auto node = std::ranges::find(nodes, as<Node>(from[i]), &std::unique_ptr<Node>::get);
    const bool are_neighbours = nodes.end() - node > 1 && node[1].get() == as<Node>(to[i]) && !node[1]->is_behind;
    const bool is_programmatic = std::memcmp(&edges[i], &api::programmatic_edge, sizeof edges[i]) == 0;
    const bool is_ordinary = std::memcmp(&edges[i], &ordinary_edge, sizeof edges[i]) == 0;
    if (!are_neighbours || !(is_ordinary || (is_programmatic && emulation().major >= 9))) return invalid_value;
    node[1]->is_behind = true;
    // An ordinary edge behind a programmatic one holds nobody up: so an H100 has it with driver 580.
    node[1]->is_programmatic = is_programmatic || node[0]->is_programmatic;
  }
  return success;
}
EXPORT Result cuGraphInstantiateWithFlags(api::GraphExecHandle* exec, api::GraphHandle graph, unsigned long long) {
  ENTER();
  auto made = std::make_unique<Exec>();
  // What we make is a chain. Anything else may run in any order.
  for (size_t i = 1; i < as<Graph>(graph)->nodes.size(); ++i)
    if (!as<Graph>(graph)->nodes[i]->is_behind) return invalid_value;
  for (const std::unique_ptr<Node>& node : as<Graph>(graph)->nodes) {
    made->places[node.get()] = made->nodes.size();
    made->nodes.push_back(*node);
  }
  ++objects;
  return *exec = reinterpret_cast<api::GraphExecHandle>(made.release()), success;
}
EXPORT Result cuGraphExecDestroy(api::GraphExecHandle exec) {
  delete as<Exec>(exec);
  return --objects, success;
}
EXPORT Result cuGraphExecKernelNodeSetParams(api::GraphExecHandle exec, api::GraphNodeHandle node,
                                             const api::KernelNodeParams* params) {
  ENTER();
  auto* all = as<Exec>(exec);
  return launch_of(*params, all->nodes.at(all->places.at(as<Node>(node))).launch);
}
EXPORT Result cuGraphLaunch(api::GraphExecHandle exec, api::StreamHandle stream) {
  ENTER();
  ++graph_launches;
  as<Stream>(stream)->add([nodes = as<Exec>(exec)->nodes] { run_chain(nodes); });
  return success;
}
