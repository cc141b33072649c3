// Blocks: closures that begin on the stack and are copied to where they can stay.
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "objc_runtime.h"

namespace {

constexpr int counted = 1 << 24;      // on the heap
constexpr int has_helpers = 1 << 25;  // that copy and destroy what was captured
constexpr int global = 1 << 28;

struct Descriptor {
  unsigned long reserved;
  unsigned long size;
  void (*copy)(void* to, const void* from);
  void (*destroy)(const void* block);
};

struct Block {
  void* isa;
  int flags;
  int count;
  void (*invoke)();
  Descriptor* descriptor;
};

std::atomic<int>& count_of(Block* block) { return *reinterpret_cast<std::atomic<int>*>(&block->count); }

}  // namespace

extern "C" {

void* _NSConcreteStackBlock[32];
void* _NSConcreteGlobalBlock[32];
void* _NSConcreteMallocBlock[32];

void* _Block_copy(const void* given) {
  auto* block = static_cast<Block*>(const_cast<void*>(given));
  if (!block || block->flags & global) return block;
  if (block->flags & counted) {
    ++count_of(block);
    return block;
  }
  auto* copy = static_cast<Block*>(malloc(block->descriptor->size));
  memcpy(copy, block, block->descriptor->size);
  copy->isa = _NSConcreteMallocBlock;
  copy->flags |= counted;
  count_of(copy) = 1;
  if (copy->flags & has_helpers) copy->descriptor->copy(copy, block);
  return copy;
}

void _Block_release(const void* given) {
  auto* block = static_cast<Block*>(const_cast<void*>(given));
  if (!block || !(block->flags & counted)) return;
  const int left = --count_of(block);
  if (left < 0) objc::fail("a block was released too often");
  if (left > 0) return;
  if (block->flags & has_helpers) block->descriptor->destroy(block);  // its memory stays, as that of objects does
}

// Of what blocks capture: objects and blocks.
void _Block_object_assign(void* place, const void* object, int kind) {
  constexpr int block = 7;  // else an object: 3
  const auto retained = static_cast<Id>(const_cast<void*>(object));
  *static_cast<Id*>(place) = (kind & block) == block ? static_cast<Id>(_Block_copy(object)) : objc_retain(retained);
}
void _Block_object_dispose(const void* object, int) { objc_release(static_cast<Id>(const_cast<void*>(object))); }

}  // extern "C"

bool objc::is_block(Id object) {
  const void* isa = object->isa;
  return isa == _NSConcreteStackBlock || isa == _NSConcreteGlobalBlock || isa == _NSConcreteMallocBlock;
}

bool objc::is_on_stack(Id block) { return block->isa == reinterpret_cast<ObjcClass*>(_NSConcreteStackBlock); }
