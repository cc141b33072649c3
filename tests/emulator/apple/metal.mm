// Metal's device, queues and encoders over the emulator's runtime. Compiled with ARC.
//
// A queue is a thread that runs command buffers in the order of their commits. Dispatches between two barriers run in
// any order, for that is what they may do. What Metal's validation would refuse ends the process with a sentence.
#import <Metal/Metal.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../runtime/abi.h"
#include "emulation.h"

extern "C" long objc_rt_live(const char* prefix);

namespace {

constexpr size_t page = 16384;  // Apple silicon's
constexpr NSUInteger most_bytes_of_set_bytes = 4096;

MetalBuild build = nullptr;
MetalWitness witness = nullptr;
MetalEmulation emulation = {0, 0, -1, uint64_t{12} << 30, 1024, false};
std::mutex emulation_mutex;
std::atomic<int64_t> commits{0};
std::atomic<int64_t> dispatches{0};

MetalEmulation how() {
  const std::lock_guard<std::mutex> lock(emulation_mutex);
  return emulation;
}

[[noreturn, gnu::format(printf, 1, 2)]] void invalid(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fputs("emulated Metal: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  abort();
}

NSString* string_of(const std::string& text) { return [NSString stringWithUTF8String:text.c_str()]; }

NSError* error_of(NSString* domain, NSInteger code, const std::string& text) {
  return [NSError errorWithDomain:domain code:code userInfo:string_of(text)];
}

// One .metal file, built once for each way of running it. Never unloaded.
struct KernelLibrary {
  void* handle = nullptr;
  std::map<std::string, const MslKernel*> kernels;
  decltype(&msl_dispatch) dispatch = nullptr;
  decltype(&msl_report) report = nullptr;
};

// Null, and the compiler's words, when it does not compile.
const KernelLibrary* library_of(const std::string& text, bool checked, std::string& words) {
  static std::mutex mutex;
  static auto* all = new std::map<std::pair<std::string, bool>, KernelLibrary>;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = all->find({text, checked});
  if (found != all->end()) return &found->second;
  std::vector<char> answer(1 << 14);
  if (!build) invalid("nobody said how to build kernels");
  if (!build(text.c_str(), checked, answer.data(), answer.size())) {
    words = answer.data();
    return nullptr;
  }
  KernelLibrary library;
  library.handle = dlopen(answer.data(), RTLD_NOW | RTLD_LOCAL);
  if (!library.handle) invalid("%s", dlerror());
  uint32_t count = 0;
  const MslKernel* table = reinterpret_cast<decltype(&msl_kernels)>(dlsym(library.handle, "msl_kernels"))(&count);
  for (uint32_t i = 0; i < count; ++i) library.kernels[table[i].name] = table + i;
  library.dispatch = reinterpret_cast<decltype(&msl_dispatch)>(dlsym(library.handle, "msl_dispatch"));
  library.report = reinterpret_cast<decltype(&msl_report)>(dlsym(library.handle, "msl_report"));
  return &all->emplace(std::make_pair(text, checked), library).first->second;
}

}  // namespace

// ---- Objects --------------------------------------------------------------------------------------------------------

@interface EmulatedDevice : NSObject <MTLDevice>
@end

@interface EmulatedBuffer : NSObject <MTLBuffer> {
 @public
  char* data_;
  size_t length_;
  size_t mapped_;  // guard pages on both sides included
}
@property(nullable, copy, atomic) NSString* label;
@end

@interface EmulatedLibrary : NSObject <MTLLibrary> {
 @public
  std::string text_;
}
@end

@interface EmulatedNames : NSArray {
 @public
  std::vector<NSString*> names_;
}
@end

@interface EmulatedFunction : NSObject <MTLFunction> {
 @public
  std::string name_;
  std::string text_;  // of its library
}
@end

@interface EmulatedPipeline : NSObject <MTLComputePipelineState> {
 @public
  std::string name_;
  std::string text_;
}
@end

@interface EmulatedResidencySet : NSObject <MTLResidencySet> {
 @public
  std::vector<id<MTLAllocation>> members_;
}
@end

@interface EmulatedQueue : NSObject <MTLCommandQueue> {
 @public
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  std::vector<id<MTLResidencySet>> sets_;
  bool ending_;
}
@property(nullable, copy, atomic) NSString* label;
- (void)push:(std::function<void()>)work;
@end

namespace {

struct Binding {
  EmulatedBuffer* buffer = nil;
  size_t offset = 0;
  std::vector<char> bytes;  // instead of a buffer
  bool is_bytes = false;
};

struct Dispatch {
  EmulatedPipeline* pipeline = nil;
  Binding bindings[msl_buffers];
  uint32_t groups[3];
  uint32_t threads[3];
  bool after_barrier = false;
};

// What the checker found; nothing when all is well.
std::string run(const Dispatch& dispatch, const MetalEmulation& emulation) {
  std::string words;
  const KernelLibrary* library = library_of(dispatch.pipeline->text_, emulation.checked, words);
  if (!library) invalid("%s", words.c_str());
  const MslKernel* kernel = library->kernels.at(dispatch.pipeline->name_);
  MslBuffer buffers[msl_buffers] = {};
  for (uint32_t p = 0; p < kernel->parameter_count; ++p) {
    const uint32_t i = kernel->parameters[p].index;
    const Binding& binding = dispatch.bindings[i];
    if (binding.is_bytes)
      buffers[i] = {const_cast<char*>(binding.bytes.data()), binding.bytes.size()};
    else if (binding.buffer)
      buffers[i] = {binding.buffer->data_ + binding.offset, binding.buffer->length_ - binding.offset};
  }
  const MslOptions options = {emulation.order, emulation.checked, emulation.checked, true};
  ++dispatches;
  if (witness) witness(kernel->name, buffers, dispatch.groups, dispatch.threads, false);
  const uint32_t problems = library->dispatch(kernel, buffers, dispatch.groups, dispatch.threads, &options);
  if (witness) witness(kernel->name, buffers, dispatch.groups, dispatch.threads, true);
  return problems ? library->report() : "";
}

std::string run_all(std::vector<Dispatch>& dispatches, const MetalEmulation& emulation) {
  std::mt19937 random(emulation.order);
  for (auto begin = dispatches.begin(); begin != dispatches.end();) {
    auto end = begin + 1;
    while (end != dispatches.end() && !end->after_barrier) ++end;
    if (emulation.order == 1) std::reverse(begin, end);
    if (emulation.order > 1) std::shuffle(begin, end, random);
    for (auto each = begin; each != end; ++each)
      if (const std::string problem = run(*each, emulation); !problem.empty()) return problem;
    begin = end;
  }
  return {};
}

}  // namespace

@interface EmulatedCommandBuffer : NSObject <MTLCommandBuffer> {
 @public
  EmulatedQueue* queue_;
  std::vector<Dispatch> dispatches_;
  std::vector<MTLCommandBufferHandler> handlers_;
  std::mutex mutex_;
  MTLCommandBufferStatus status_;
  NSError* error_;
  bool encoding_;
}
@end

@interface EmulatedEncoder : NSObject <MTLComputeCommandEncoder> {
 @public
  EmulatedCommandBuffer* buffer_;
  Dispatch next_;
  bool ended_;
}
@end

@implementation EmulatedBuffer
- (void*)contents {
  return data_;
}
- (NSUInteger)length {
  return length_;
}
- (void)dealloc {
  munmap(data_ - page, mapped_);
}
@end

@implementation MTLCompileOptions
@end
@implementation MTLResidencySetDescriptor
@end

@implementation EmulatedNames
- (NSUInteger)count {
  return names_.size();
}
- (id)objectAtIndex:(NSUInteger)index {
  return names_.at(index);
}
@end

@implementation EmulatedLibrary
- (NSArray<NSString*>*)functionNames {
  std::string words;
  EmulatedNames* names = [EmulatedNames new];
  for (const auto& [name, kernel] : library_of(text_, false, words)->kernels) names->names_.push_back(string_of(name));
  return names;
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)name {
  std::string words;
  if (!library_of(text_, false, words)->kernels.count(name.UTF8String)) return nil;
  EmulatedFunction* function = [EmulatedFunction new];
  function->name_ = name.UTF8String;
  function->text_ = text_;
  return function;
}
@end

@implementation EmulatedFunction
- (NSString*)name {
  return string_of(name_);
}
@end

@implementation EmulatedPipeline
- (NSUInteger)maxTotalThreadsPerThreadgroup {
  return how().most_threads;
}
- (NSUInteger)threadExecutionWidth {
  return 32;
}
@end

@implementation EmulatedResidencySet
- (void)addAllocation:(id<MTLAllocation>)allocation {
  members_.push_back(allocation);
}
- (void)removeAllocation:(id<MTLAllocation>)allocation {
  const auto found = std::find(members_.begin(), members_.end(), allocation);
  if (found == members_.end()) invalid("removeAllocation: what was never added");
  members_.erase(found);
}
- (void)commit {
}
- (void)requestResidency {
}
@end

// ---- Running --------------------------------------------------------------------------------------------------------

@implementation EmulatedQueue
- (void)start {
  EmulatedQueue* __unsafe_unretained me = self;
  thread_ = std::thread([me] {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(me->mutex_);
        me->changed_.wait(lock, [me] { return me->ending_ || !me->work_.empty(); });
        if (me->work_.empty()) return;
        work = std::move(me->work_.front());
        me->work_.pop_front();
      }
      @autoreleasepool {
        work();
        work = nullptr;
      }
    }
  });
}
- (void)push:(std::function<void()>)work {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    work_.push_back(std::move(work));
  }
  changed_.notify_one();
}
- (id<MTLCommandBuffer>)commandBuffer {
  EmulatedCommandBuffer* buffer = [EmulatedCommandBuffer new];
  buffer->queue_ = self;
  return buffer;
}
- (void)addResidencySet:(id<MTLResidencySet>)set {
  sets_.push_back(set);
}
- (void)dealloc {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  // The last to let go may be the thread itself.
  if (thread_.get_id() == std::this_thread::get_id())
    thread_.detach();
  else
    thread_.join();
}
@end

@implementation EmulatedCommandBuffer
- (MTLCommandBufferStatus)status {
  const std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}
- (NSError*)error {
  const std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}
- (void)addCompletedHandler:(MTLCommandBufferHandler)handler {
  if (status_ >= MTLCommandBufferStatusCommitted) invalid("addCompletedHandler: after the commit");
  handlers_.push_back(handler);
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)type {
  if (encoding_) invalid("a command buffer has one encoder at a time");
  if (status_ >= MTLCommandBufferStatusCommitted) invalid("encoding after the commit");
  if (type != MTLDispatchTypeConcurrent) invalid("serial encoders are not emulated");
  encoding_ = true;
  EmulatedEncoder* encoder = [EmulatedEncoder new];
  encoder->buffer_ = self;
  return encoder;
}
- (void)commit {
  if (encoding_) invalid("commit: an encoder was not ended");
  if (status_ >= MTLCommandBufferStatusCommitted) invalid("commit: twice");
  status_ = MTLCommandBufferStatusCommitted;
  const MetalEmulation emulation = how();
  const bool fails = commits++ == emulation.fail_at;
  EmulatedCommandBuffer* me = self;
  [queue_ push:[me, emulation, fails] {
    if (emulation.delay) usleep(emulation.delay);
    if (fails) me->dispatches_.resize(me->dispatches_.size() / 2);
    std::string problem = run_all(me->dispatches_, emulation);
    if (fails && problem.empty()) problem = "told to fail";
    me->dispatches_.clear();
    {
      const std::lock_guard<std::mutex> lock(me->mutex_);
      me->status_ = problem.empty() ? MTLCommandBufferStatusCompleted : MTLCommandBufferStatusError;
      if (!problem.empty())
        me->error_ = error_of(@"MTLCommandBufferErrorDomain", MTLCommandBufferErrorPageFault, problem);
    }
    std::vector<MTLCommandBufferHandler> handlers = std::move(me->handlers_);
    for (const MTLCommandBufferHandler& handler : handlers) handler(me);
  }];
}
- (void)dealloc {
  if (encoding_) invalid("a command buffer was dropped with an encoder that was not ended");
}
@end

@implementation EmulatedEncoder
- (void)require_open {
  if (ended_) invalid("an encoder was used after endEncoding");
}
- (void)endEncoding {
  [self require_open];
  ended_ = true;
  buffer_->encoding_ = false;
}
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state {
  [self require_open];
  if (!state) invalid("setComputePipelineState: nil");
  next_.pipeline = (EmulatedPipeline*)state;
}
- (void)setBytes:(const void*)bytes length:(NSUInteger)length atIndex:(NSUInteger)index {
  [self require_open];
  if (!length || length > most_bytes_of_set_bytes) invalid("setBytes: 1 to 4096 bytes, found %lu", length);
  if (index >= msl_buffers) invalid("setBytes: index %lu", index);
  const char* first = static_cast<const char*>(bytes);
  next_.bindings[index] = {nil, 0, {first, first + length}, true};
}
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index {
  [self require_open];
  if (index >= msl_buffers) invalid("setBuffer: index %lu", index);
  if (buffer && offset >= buffer.length)
    invalid("setBuffer: offset %lu of %s, which has %lu bytes", offset, ((EmulatedBuffer*)buffer).label.UTF8String,
            buffer.length);
  next_.bindings[index] = {(EmulatedBuffer*)buffer, offset, {}, false};
}
- (void)memoryBarrierWithScope:(MTLBarrierScope)scope {
  [self require_open];
  if (scope != MTLBarrierScopeBuffers) invalid("memoryBarrierWithScope: buffers are all there are");
  next_.after_barrier = true;
}
- (void)dispatchThreadgroups:(MTLSize)groups threadsPerThreadgroup:(MTLSize)threads {
  [self require_open];
  if (!next_.pipeline) invalid("a dispatch without a pipeline");
  const char* name = next_.pipeline->name_.c_str();
  const NSUInteger count = threads.width * threads.height * threads.depth;
  if (!groups.width || !groups.height || !groups.depth) invalid("%s: an empty grid", name);
  if (!count || count > next_.pipeline.maxTotalThreadsPerThreadgroup) invalid("%s: %lu threads", name, count);
  if (count % 32) invalid("%s: %lu threads are no whole simdgroups", name, count);
  const NSUInteger extents[] = {groups.width, groups.height, groups.depth};
  const NSUInteger sizes[] = {threads.width, threads.height, threads.depth};
  for (int axis = 0; axis < 3; ++axis) {
    next_.groups[axis] = static_cast<uint32_t>(extents[axis]);
    next_.threads[axis] = static_cast<uint32_t>(sizes[axis]);
  }
  buffer_->dispatches_.push_back(next_);
  next_.after_barrier = false;
}
- (void)dealloc {
  if (!ended_) invalid("an encoder was dropped that was not ended");
}
@end

// ---- The device -----------------------------------------------------------------------------------------------------

@implementation EmulatedDevice
- (NSString*)name {
  return @"an emulated GPU";
}
- (BOOL)hasUnifiedMemory {
  return YES;
}
- (uint64_t)recommendedMaxWorkingSetSize {
  return how().working_set;
}
- (NSUInteger)maxBufferLength {
  return NSUInteger{8} << 30;
}
- (NSUInteger)maxThreadgroupMemoryLength {
  return msl_threadgroup_memory;
}
- (MTLSize)maxThreadsPerThreadgroup {
  return MTLSizeMake(1024, 1024, 1024);
}
- (BOOL)supportsFamily:(MTLGPUFamily)family {
  return family <= MTLGPUFamilyApple7;
}
- (id<MTLCommandQueue>)newCommandQueue {
  EmulatedQueue* queue = [EmulatedQueue new];
  [queue start];
  return queue;
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
  if (!length || length > self.maxBufferLength) return nil;
  const size_t mapped = (length + page - 1) / page * page + 2 * page;
  void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nil;
  EmulatedBuffer* buffer = [EmulatedBuffer new];
  buffer->data_ = static_cast<char*>(memory) + page;
  buffer->length_ = length;
  buffer->mapped_ = mapped;
  mprotect(memory, page, PROT_NONE);
  mprotect(static_cast<char*>(memory) + mapped - page, page, PROT_NONE);
  return buffer;
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source
                               options:(MTLCompileOptions*)options
                                 error:(NSError* __autoreleasing*)error {
  if (options.mathMode != MTLMathModeSafe) invalid("kernels here are written for safe math");
  std::string words;
  if (!library_of(source.UTF8String, false, words)) {
    if (error) *error = error_of(@"MTLLibraryErrorDomain", MTLLibraryErrorCompileFailure, words);
    return nil;
  }
  EmulatedLibrary* library = [EmulatedLibrary new];
  library->text_ = source.UTF8String;
  return library;
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function
                                                             error:(NSError* __autoreleasing*)error {
  if (!function) invalid("newComputePipelineStateWithFunction: nil");
  EmulatedPipeline* pipeline = [EmulatedPipeline new];
  pipeline->name_ = ((EmulatedFunction*)function)->name_;
  pipeline->text_ = ((EmulatedFunction*)function)->text_;
  return pipeline;
}
- (id<MTLResidencySet>)newResidencySetWithDescriptor:(MTLResidencySetDescriptor*)descriptor
                                               error:(NSError* __autoreleasing*)error {
  return [EmulatedResidencySet new];
}
@end

extern "C" {

id<MTLDevice> MTLCreateSystemDefaultDevice(void) {
  static EmulatedDevice* device = [EmulatedDevice new];
  return device;
}

__attribute__((visibility("default"))) void metal_build_with(MetalBuild given) { build = given; }

__attribute__((visibility("default"))) void metal_emulate(const MetalEmulation* given) {
  const std::lock_guard<std::mutex> lock(emulation_mutex);
  emulation = *given;
  commits = 0;
}

__attribute__((visibility("default"))) void metal_show(MetalWitness given) { witness = given; }

__attribute__((visibility("default"))) int64_t metal_commits() { return commits; }
__attribute__((visibility("default"))) int64_t metal_dispatches() { return dispatches; }
__attribute__((visibility("default"))) int64_t metal_live_objects() {
  return objc_rt_live("Emulated") - objc_rt_live("EmulatedDevice") - objc_rt_live("EmulatedString") +
         objc_rt_live("MTL");
}

}  // extern "C"
