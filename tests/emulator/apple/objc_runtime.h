// A small Objective-C runtime for tests on Linux: what clang calls for -fobjc-runtime=gnustep-2.1 with ARC. Zombies
// always: what is released too often, or used after that, ends the process with a sentence.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

struct ObjcClass;
struct ObjcObject {
  ObjcClass* isa;
};
using Id = ObjcObject*;
using Implementation = void (*)();

struct ObjcSelector {
  const char* name;  // interned: equal names are one pointer
  const char* types;
};

struct ObjcMethod {
  Implementation implementation;
  ObjcSelector* selector;
  const char* types;
};

struct ObjcMethodList {
  ObjcMethodList* next;
  int count;
  size_t size;
  ObjcMethod methods[1];
};

struct ObjcVariable {
  const char* name;
  const char* type;
  int* offset;
  uint32_t size;
  uint32_t flags;
};

struct ObjcVariableList {
  int count;
  size_t size;
  ObjcVariable variables[1];
};

// As the compiler lays it out.
struct ObjcClass {
  ObjcClass* isa;
  ObjcClass* super;
  const char* name;
  long version;
  unsigned long info;  // 1: a metaclass, whose methods are those of the class
  long size;           // negative until the variables are placed behind those of super
  ObjcVariableList* variables;
  ObjcMethodList* methods;
  void* dispatch_table;
  Implementation construct;
  Implementation destruct;
  ObjcClass* subclasses;
  ObjcClass* siblings;
  void* protocols;
  void* extra;
  long abi;
  void* properties;
};

struct ObjcCategory {
  const char* name;
  void* others[6];
};

// What a compiled file brings: sections, by their ends; each has an empty entry.
struct ObjcImage {
  uint64_t version;
  ObjcSelector *selectors, *selectors_end;
  ObjcClass **classes, **classes_end;
  ObjcClass ***class_references, ***class_references_end;
  ObjcCategory *categories, *categories_end;
  void *protocols, *protocols_end;
  void *protocol_references, *protocol_references_end;
  void *aliases, *aliases_end;
  void *strings, *strings_end;
};

Id class_createInstance(ObjcClass* of, size_t extra);
void object_dispose(Id object);
ObjcClass* object_getClass(Id object);
const char* class_getName(ObjcClass* of);
Id objc_retain(Id object);
void objc_release(Id object);
Id objc_autorelease(Id object);
Implementation objc_rt_lookup(Id self, ObjcSelector* selector);

void* _Block_copy(const void* block);
void _Block_release(const void* block);

// Objects that live, of classes whose names begin so.
long objc_rt_live(const char* prefix);
}

namespace objc {

bool is_block(Id object);
bool is_on_stack(Id block);
[[noreturn, gnu::format(printf, 1, 2)]] void fail(const char* format, ...);

}  // namespace objc
