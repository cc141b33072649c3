// The classes of the stand-in's Foundation.h, with references counted by hand.
#import <Foundation/Foundation.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>

extern "C" {
id class_createInstance(Class of, size_t extra);
void object_dispose(id object);
id objc_retain(id object);
void objc_release(id object);
id objc_autorelease(id object);
Class object_getClass(id object);
const char* class_getName(Class of);
}

@implementation NSObject
+ (instancetype)alloc {
  return class_createInstance(self, 0);
}
+ (instancetype)new {
  return [[self alloc] init];
}
+ (Class)class {
  return self;
}
- (instancetype)init {
  return self;
}
- (void)dealloc {
  object_dispose(self);
}
- (instancetype)retain {
  return objc_retain(self);
}
- (oneway void)release {
  objc_release(self);
}
- (instancetype)autorelease {
  return objc_autorelease(self);
}
- (id)copy {
  return [self retain];
}
- (Class)class {
  return object_getClass(self);
}
- (NSUInteger)hash {
  return reinterpret_cast<NSUInteger>(self);
}
- (BOOL)isEqual:(id)object {
  return self == object;
}
- (NSString*)description {
  return [NSString stringWithUTF8String:class_getName(object_getClass(self))];
}
@end

@interface EmulatedString : NSString {
 @public
  char* text_;
}
@end

@implementation NSString
+ (instancetype)stringWithUTF8String:(const char*)text {
  EmulatedString* made = [[EmulatedString alloc] init];
  made->text_ = strdup(text);
  return (id)[made autorelease];
}
- (const char*)UTF8String {
  return "";
}
- (NSUInteger)length {
  return strlen(self.UTF8String);
}
- (NSUInteger)hash {
  return std::hash<std::string>()(self.UTF8String);
}
- (BOOL)isEqual:(id)object {
  return object && !strcmp(self.UTF8String, ((NSString*)object).UTF8String);
}
- (NSString*)description {
  return self;
}
@end

@implementation EmulatedString
- (const char*)UTF8String {
  return text_;
}
- (void)dealloc {
  free(text_);
  [super dealloc];
}
@end

@implementation NSConstantString
- (const char*)UTF8String {
  return bytes_;
}
@end

// Up to eight characters of seven bits in the pointer itself, the first at the top, their number above the tag.
@implementation NSTinyString
- (const char*)UTF8String {
  const auto bits = reinterpret_cast<uintptr_t>(self);
  const int length = static_cast<int>(bits >> 3 & 31);
  char text[16] = {};
  for (int i = 0; i < length; i++) text[i] = static_cast<char>(bits >> (57 - i * 7) & 127);
  return [NSString stringWithUTF8String:text].UTF8String;
}
@end

// Others make it.
@implementation NSArray
- (NSUInteger)count {
  return 0;
}
- (id)objectAtIndex:(NSUInteger)index {
  return nil;
}
@end

@implementation NSError {
  NSInteger code_;
  NSString* domain_;
  NSString* text_;
}
// userInfo is the text itself.
+ (instancetype)errorWithDomain:(NSString*)domain code:(NSInteger)code userInfo:(id)userInfo {
  NSError* error = [[self alloc] init];
  error->code_ = code;
  error->domain_ = [domain retain];
  error->text_ = [userInfo retain];
  return [error autorelease];
}
- (NSInteger)code {
  return code_;
}
- (NSString*)domain {
  return domain_;
}
- (NSString*)localizedDescription {
  return text_;
}
- (void)dealloc {
  [domain_ release];
  [text_ release];
  [super dealloc];
}
@end
