// Metal's queues, command buffers, encoders and events over the emulator's runtime. Compiled with ARC.
//
// A queue is a thread that runs command buffers in the order of their commits. Dispatches between two barriers run in
// any order, for that is what they may do; encoders, whose buffers the driver tracks, run one behind another. A wait
// for an event that nobody raises is a deadlock, and ends the process with a sentence.
#import <Metal/Metal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <random>

#include "metal.h"

using namespace emulated;

namespace {

constexpr NSUInteger max_bytes_of_set_bytes = 4096;

struct Binding {
  EmulatedBuffer* buffer = nil;
  size_t offset = 0;
  std::vector<char> bytes;  // instead of a buffer
  bool is_bytes = false;
};

// A dispatch, or what a command buffer does to an event between two encoders.
struct Command {
  EmulatedPipeline* pipeline = nil;
  Binding bindings[msl_buffers];
  uint32_t groups[3];
  uint32_t threads[3];
  bool after_barrier = false;
  EmulatedEvent* event = nil;
  uint64_t value = 0;
  bool raises = false;  // the event; else waits for it
};

// What the checker found; nothing when all is well.
std::string run(const Command& dispatch, const MetalEmulation& emulation) {
  std::string words;
  const KernelLibrary* library =
      emulation.checked ? library_of(dispatch.pipeline->text_, true, words) : dispatch.pipeline->library_;
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
  show(*kernel, buffers, dispatch.groups, dispatch.threads, false);
  const uint32_t problems = library->dispatch(kernel, buffers, dispatch.groups, dispatch.threads, &options);
  show(*kernel, buffers, dispatch.groups, dispatch.threads, true);
  return problems ? library->report() : "";
}

// A late GPU is late wherever the host may be ahead of it.
void meet(const Command& command, const MetalEmulation& emulation) {
  EmulatedEvent* seen = emulation.deaf ? [EmulatedEvent new] : command.event;
  if (command.raises)
    [command.event raise:command.value];
  else
    [seen stand:command.value patience:emulation.patience who:"a command buffer"];
  if (emulation.delay) usleep(emulation.delay);
}

std::string run_all(std::vector<Command>& commands, const MetalEmulation& emulation) {
  std::mt19937 random(emulation.order);
  for (auto begin = commands.begin(); begin != commands.end();) {
    if (begin->event) {
      meet(*begin++, emulation);
      continue;
    }
    auto end = begin + 1;
    while (end != commands.end() && !end->after_barrier && !end->event) ++end;
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
  std::vector<Command> commands_;
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
  Command next_;
  bool ended_;
}
@end

@implementation EmulatedEvent
- (uint64_t)signaledValue {
  const std::lock_guard<std::mutex> lock(mutex_);
  return value_;
}
- (void)setSignaledValue:(uint64_t)value {
  if (value < self.signaledValue) invalid("signaledValue: from %lu back to %lu", self.signaledValue, value);
  [self raise:value];
}
- (void)raise:(uint64_t)value {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    value_ = std::max(value_, value);
  }
  changed_.notify_all();
}
- (void)stand:(uint64_t)value patience:(uint64_t)milliseconds who:(const char*)who {
  constexpr int64_t turns = 50;  // so that a process that was stopped meanwhile has not waited all the while
  const std::chrono::microseconds turn(static_cast<int64_t>(milliseconds) * 1000 / turns);
  std::unique_lock<std::mutex> lock(mutex_);
  bool reached = false;
  for (int64_t i = 0; i < turns && !reached; ++i)
    reached = changed_.wait_for(lock, turn, [&] { return value_ >= value; });
  if (!reached) invalid("a deadlock: %s waits for %lu of an event that stays at %lu", who, value, value_);
}
- (BOOL)waitUntilSignaledValue:(uint64_t)value timeoutMS:(uint64_t)milliseconds {
  [self stand:value patience:std::min<uint64_t>(milliseconds, how().patience) who:"the host"];
  return YES;
}
@end

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
  encoder->next_.after_barrier = true;
  return encoder;
}
- (void)encode:(id<MTLEvent>)event value:(uint64_t)value raises:(bool)raises {
  if (encoding_) invalid("an event within an encoder");
  if (status_ >= MTLCommandBufferStatusCommitted) invalid("encoding after the commit");
  Command command;
  command.event = (EmulatedEvent*)event;
  command.value = value;
  command.raises = raises;
  commands_.push_back(command);
}
- (void)encodeSignalEvent:(id<MTLEvent>)event value:(uint64_t)value {
  [self encode:event value:value raises:true];
}
- (void)encodeWaitForEvent:(id<MTLEvent>)event value:(uint64_t)value {
  [self encode:event value:value raises:false];
}
- (void)commit {
  if (encoding_) invalid("commit: an encoder was not ended");
  if (status_ >= MTLCommandBufferStatusCommitted) invalid("commit: twice");
  status_ = MTLCommandBufferStatusCommitted;
  const MetalEmulation emulation = how();
  const bool fails = next_commit() == emulation.fail_at;
  EmulatedCommandBuffer* me = self;
  [queue_ push:[me, emulation, fails] {
    if (emulation.delay) usleep(emulation.delay);
    if (fails) me->commands_.resize(me->commands_.size() / 2);
    std::string problem = run_all(me->commands_, emulation);
    if (fails && problem.empty()) problem = "told to fail";
    me->commands_.clear();
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
  if (!length || length > max_bytes_of_set_bytes) invalid("setBytes: 1 to 4096 bytes, found %lu", length);
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
  buffer_->commands_.push_back(next_);
  next_.after_barrier = false;
}
- (void)dealloc {
  if (!ended_) invalid("an encoder was dropped that was not ended");
}
@end
