// Objects let go of wrongly, one way an argument, by what ARC calls. Prints how many live in the end.
#import <Foundation/Foundation.h>

#include <cstdio>
#include <string>

extern "C" {
long objc_rt_live(const char* prefix);
id objc_retain(id object);
void objc_release(id object);
id objc_autorelease(id object);
void* objc_autoreleasePoolPush();
void objc_autoreleasePoolPop(void* place);
void* _Block_copy(const void* block);
void _Block_release(const void* block);
}

@interface Sample : NSObject
- (void)work;
@end
@implementation Sample
- (void)work {
}
@end

int main(int, char** arguments) {
  const std::string how = arguments[1];
  Sample* sample = [Sample new];
  if (how == "balanced") {
    void* pool = objc_autoreleasePoolPush();
    objc_autorelease(objc_retain(sample));
    objc_release(sample);
    [sample work];
    objc_autoreleasePoolPop(pool);
  }
  if (how == "captured") {
    void (^block)() = (void (^)())_Block_copy((const void*)^{
      [sample work];
    });
    objc_release(sample);
    block();
    _Block_release((const void*)block);
  }
  if (how == "block released too often") {
    const void* block = _Block_copy((const void*)^{
      [sample work];
    });
    for (int i = 0; i < 2; ++i) _Block_release(block);
  }
  if (how == "released too often")
    for (int i = 0; i < 2; ++i) objc_release(sample);
  if (how == "retained when gone" || how == "told when gone") {
    objc_release(sample);
    if (how == "told when gone")
      [sample work];
    else
      objc_retain(sample);
  }
  printf("%ld\n", objc_rt_live("Sample"));  // "leaked" did nothing
}
