// The objects of the stand-in for Metal, and what they share. For device.mm and commands.mm.
#pragma once
#import <Metal/Metal.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../runtime/abi.h"
#include "emulation.h"

NS_ASSUME_NONNULL_BEGIN

namespace emulated {

MetalEmulation how();
// What Metal's validation would refuse ends the process with a sentence.
[[noreturn, gnu::format(printf, 1, 2)]] void invalid(const char* format, ...);
NSError* error_of(NSString* domain, NSInteger code, const std::string& text);

// One .metal file, built once for each way of running it. Never unloaded.
struct KernelLibrary {
  void* _Nullable handle = nullptr;
  std::map<std::string, const MslKernel*> kernels;
  decltype(&msl_dispatch) _Nullable dispatch = nullptr;
  decltype(&msl_report) _Nullable report = nullptr;
};

// Null, and the compiler's words, when it does not compile.
const KernelLibrary* _Nullable library_of(const std::string& text, bool checked, std::string& words);

// Told of a dispatch, when somebody listens.
void show(const MslKernel& kernel, const MslBuffer* buffers, const uint32_t* groups, const uint32_t* threads,
          bool after);
// The number of a commit, from 0 since the emulation was set.
int64_t next_commit();

}  // namespace emulated

typedef void (^EmulatedDeallocator)(void* pointer, NSUInteger length);

@interface EmulatedBuffer : NSObject <MTLBuffer> {
 @public
  char* data_;
  size_t length_;
  size_t mapped_;  // guard pages on both sides included; 0: somebody else's
  EmulatedDeallocator _Nullable deallocator_;
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
  const emulated::KernelLibrary* library_;  // that is not checked
}
@end

@interface EmulatedResidencySet : NSObject <MTLResidencySet> {
 @public
  std::vector<id<MTLAllocation>> members_;
}
@end

@interface EmulatedEvent : NSObject <MTLSharedEvent> {
 @public
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t value_;
}
// Without a look at who does; for so long, behind which nobody will.
- (void)raise:(uint64_t)value;
- (void)stand:(uint64_t)value patience:(uint64_t)milliseconds who:(const char*)who;
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
- (void)start;
- (void)push:(std::function<void()>)work;
@end

NS_ASSUME_NONNULL_END
