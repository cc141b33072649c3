// Metal's device, memory and libraries over the emulator's runtime. Compiled with ARC.
#import <Metal/Metal.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "metal.h"

extern "C" long objc_rt_live(const char* prefix);

namespace emulated {
namespace {

constexpr size_t page = 16384;  // Apple silicon's

MetalBuild build = nullptr;
MetalWitness witness = nullptr;
MetalEmulation emulation = {0, 0, -1, uint64_t{12} << 30, 1024, false, true, false, 60000, 7, ""};
std::mutex emulation_mutex;
std::atomic<int64_t> commits{0};
std::atomic<int64_t> dispatches{0};

NSString* string_of(const std::string& text) { return [NSString stringWithUTF8String:text.c_str()]; }

}  // namespace

MetalEmulation how() {
  const std::lock_guard<std::mutex> lock(emulation_mutex);
  return emulation;
}

void invalid(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fputs("emulated Metal: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  abort();
}

NSError* error_of(NSString* domain, NSInteger code, const std::string& text) {
  return [NSError errorWithDomain:domain code:code userInfo:string_of(text)];
}

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

void show(const MslKernel& kernel, const MslBuffer* buffers, const uint32_t* groups, const uint32_t* threads,
          bool after) {
  if (!after) ++dispatches;
  if (witness) witness(kernel.name, buffers, groups, threads, after);
}

int64_t next_commit() { return commits++; }

}  // namespace emulated

using namespace emulated;

@interface EmulatedDevice : NSObject <MTLDevice>
@end

@implementation EmulatedBuffer
- (void*)contents {
  return data_;
}
- (NSUInteger)length {
  return length_;
}
- (void)dealloc {
  if (mapped_) munmap(data_ - page, mapped_);
  if (deallocator_) deallocator_(data_, length_);
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
  return how().max_threads;
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
  return family < MTLGPUFamilyApple1 + how().family;
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
- (id<MTLBuffer>)newBufferWithBytesNoCopy:(void*)pointer
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(void (^)(void*, NSUInteger))deallocator {
  const auto own_page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const bool whole = reinterpret_cast<uintptr_t>(pointer) % own_page == 0 && length % own_page == 0;
  if (!whole || !length || length > self.maxBufferLength || !how().wraps) return nil;
  EmulatedBuffer* buffer = [EmulatedBuffer new];
  buffer->data_ = static_cast<char*>(pointer);
  buffer->length_ = length;
  buffer->deallocator_ = deallocator;
  return buffer;
}
- (id<MTLSharedEvent>)newSharedEvent {
  return [EmulatedEvent new];
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
  if (((EmulatedFunction*)function)->name_ == how().refused) {
    if (error) *error = error_of(@"AGXMetalG13X", 3, "told to refuse");
    return nil;
  }
  EmulatedPipeline* pipeline = [EmulatedPipeline new];
  pipeline->name_ = ((EmulatedFunction*)function)->name_;
  pipeline->text_ = ((EmulatedFunction*)function)->text_;
  std::string words;
  pipeline->library_ = library_of(pipeline->text_, false, words);  // there, because it has the function
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
  return how().family ? device : nil;
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
