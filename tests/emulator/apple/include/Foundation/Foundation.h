// Stand-in for the part of Foundation that csrc/metal uses: Apple's names and signatures.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef unsigned long NSUInteger;
typedef long NSInteger;
typedef double CFTimeInterval;
typedef bool BOOL;
#define YES true
#define NO false
#define nil nullptr
#define NS_ENUM(T, N) \
  enum N : T N;       \
  enum N : T
#define NS_OPTIONS(T, N) NS_ENUM(T, N)
#define NS_ASSUME_NONNULL_BEGIN _Pragma("clang assume_nonnull begin")
#define NS_ASSUME_NONNULL_END _Pragma("clang assume_nonnull end")

@class NSString;

@protocol NSObject
- (BOOL)isEqual:(id)object;
- (NSUInteger)hash;
- (Class)class;
@property(readonly, copy) NSString* description;
#if !__has_feature(objc_arc)
- (instancetype)retain;
- (oneway void)release;
- (instancetype)autorelease;
#endif
@end

__attribute__((objc_root_class))
@interface NSObject<NSObject> {
  Class isa;
}
+ (instancetype)alloc;
+ (instancetype)new;
+ (Class)class;
- (instancetype)init;
- (void)dealloc;
- (id)copy;
@end

@interface NSString : NSObject
+ (instancetype)stringWithUTF8String:(const char*)text;
@property(readonly) const char* UTF8String;
@property(readonly) NSUInteger length;
@end

// What clang makes of @"literals".
@interface NSConstantString : NSString {
  uint32_t flags_, length_, size_, hash_;
  const char* bytes_;
}
@end
@interface NSTinyString : NSString
@end

@interface NSArray<ObjectType> : NSObject
@property(readonly) NSUInteger count;
- (ObjectType)objectAtIndex:(NSUInteger)index;
@end

@interface NSError : NSObject
+ (instancetype)errorWithDomain:(NSString*)domain code:(NSInteger)code userInfo:(id)userInfo;
@property(readonly) NSInteger code;
@property(readonly, copy) NSString* domain;
@property(readonly, copy) NSString* localizedDescription;
@end
