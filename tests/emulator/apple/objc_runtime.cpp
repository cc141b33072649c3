// Classes, references, properties and pools.
#include "objc_runtime.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr size_t header_bytes = 16;  // before an object: its count
constexpr long dead = -1000000;
constexpr unsigned long metaclass = 1;

struct Call {
  ObjcClass* of;
  const char* name;
  bool operator==(const Call&) const = default;
};
struct CallHash {
  size_t operator()(const Call& call) const {
    return reinterpret_cast<size_t>(call.of) * 31 + reinterpret_cast<size_t>(call.name);
  }
};

// Never destroyed: objects may be released while the process ends.
struct Runtime {
  std::shared_mutex mutex;
  std::set<std::string> names;
  std::unordered_map<std::string, ObjcClass*> classes;
  std::set<const void*> ready;  // classes and their metaclasses
  std::unordered_map<Call, Implementation, CallHash> found;
  ObjcClass* tiny_string = nullptr;      // of short literals, which are kept in the pointer
  ObjcClass* constant_string = nullptr;  // of the others
  std::mutex census;
  std::map<std::string, long> live;
};

Runtime& runtime() {
  static auto* all = new Runtime;
  return *all;
}

const char* interned(const char* name) { return runtime().names.insert(name).first->c_str(); }

bool is_tagged(Id object) { return reinterpret_cast<uintptr_t>(object) & 7; }

ObjcClass* class_of(Id object) { return is_tagged(object) ? runtime().tiny_string : object->isa; }

std::atomic<long>& count_of(Id object) {
  return *reinterpret_cast<std::atomic<long>*>(reinterpret_cast<char*>(object) - header_bytes);
}

// Literals and classes.
bool is_for_ever(Id object) {
  return is_tagged(object) || object->isa == runtime().constant_string || object->isa->info & metaclass;
}

bool is_gone(Id object) { return !is_for_ever(object) && !objc::is_block(object) && count_of(object) < dead / 2; }

void intern_methods(ObjcMethodList* list) {
  for (; list; list = list->next)
    for (int i = 0; i < list->count; ++i) list->methods[i].selector->name = interned(list->methods[i].selector->name);
}

template <typename Body>
void for_methods(ObjcClass* of, const char* name, const Body& body) {
  for (ObjcMethodList* list = of->methods; list; list = list->next)
    for (int i = 0; i < list->count; ++i)
      if (!strcmp(list->methods[i].selector->name, name)) body(list->methods[i].implementation);
}

// The superclass first, behind whose variables these lie.
void make_ready(ObjcClass* made) {
  Runtime& all = runtime();
  if (!all.ready.insert(made).second) return;
  if (made->super) make_ready(made->super);
  if (made->size <= 0) {
    const long above = made->super ? (made->super->size + 7) / 8 * 8 : 0;
    for (int i = 0; made->variables && i < made->variables->count; ++i)
      *made->variables->variables[i].offset += static_cast<int>(above);
    made->size = above - made->size;
  }
  made->isa->super = made->super ? made->super->isa : made;
  all.ready.insert(made->isa);
  all.classes[made->name] = made;
  if (!strcmp(made->name, "NSTinyString")) all.tiny_string = made;
  if (!strcmp(made->name, "NSConstantString")) all.constant_string = made;
}

Implementation find(ObjcClass* of, const char* name) {
  for (; of; of = of->super) {
    Implementation result = nullptr;
    for_methods(of, name, [&](Implementation each) { result = each; });
    if (result) return result;
  }
  return nullptr;
}

void construct(ObjcClass* of, Id object) {
  if (of->super) construct(of->super, object);
  for_methods(of, ".cxx_construct",
              [&](Implementation each) { reinterpret_cast<Id (*)(Id, ObjcSelector*)>(each)(object, nullptr); });
}

std::vector<Id>& pool() {
  static thread_local std::vector<Id> objects;
  return objects;
}

}  // namespace

void objc::fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fputs("objc_runtime: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  abort();
}

extern "C" {

// ---- Classes --------------------------------------------------------------------------------------------------------

void __objc_load(ObjcImage* image) {
  Runtime& all = runtime();
  const std::unique_lock lock(all.mutex);
  for (ObjcCategory* each = image->categories; each < image->categories_end; ++each)
    if (each->name) objc::fail("categories are not emulated, found %s", each->name);
  for (ObjcSelector* each = image->selectors; each < image->selectors_end; ++each)
    if (each->name) each->name = interned(each->name);
  for (ObjcClass** each = image->classes; each < image->classes_end; ++each) {
    if (!*each) continue;
    intern_methods((*each)->methods);
    intern_methods((*each)->isa->methods);
    (*each)->isa->info |= metaclass;
    if (!(*each)->isa->name) (*each)->isa->name = (*each)->name;
    make_ready(*each);
  }
  all.found.clear();
}

Implementation objc_rt_lookup(Id self, ObjcSelector* selector) {
  Runtime& all = runtime();
  ObjcClass* of = class_of(self);
  if (is_gone(self)) objc::fail("a %s was told to %s after it was gone", of->name, selector->name);
  {
    const std::shared_lock lock(all.mutex);
    const auto known = all.found.find({of, selector->name});
    if (known != all.found.end()) return known->second;
  }
  const std::unique_lock lock(all.mutex);
  const Implementation result = find(of, selector->name);
  if (!result) objc::fail("%c[%s %s]: no such method", of->info & metaclass ? '+' : '-', of->name, selector->name);
  return all.found[{of, selector->name}] = result;
}

struct ObjcSuper {
  Id self;
  ObjcClass* super;
};

Implementation objc_msg_lookup_super(ObjcSuper* call, ObjcSelector* selector) {
  const std::shared_lock lock(runtime().mutex);
  const Implementation result = find(call->super, selector->name);
  if (!result) objc::fail("super has no %s", selector->name);
  return result;
}

ObjcClass* objc_lookUpClass(const char* name) {
  const std::shared_lock lock(runtime().mutex);
  const auto found = runtime().classes.find(name);
  return found == runtime().classes.end() ? nullptr : found->second;
}
ObjcClass* objc_getClass(const char* name) { return objc_lookUpClass(name); }
ObjcClass* object_getClass(Id object) { return object ? class_of(object) : nullptr; }
const char* class_getName(ObjcClass* of) { return of->name; }

// ---- Objects --------------------------------------------------------------------------------------------------------

Id class_createInstance(ObjcClass* of, size_t extra) {
  char* memory = static_cast<char*>(calloc(1, header_bytes + static_cast<size_t>(of->size) + extra));
  const Id object = reinterpret_cast<Id>(memory + header_bytes);
  count_of(object) = 1;
  object->isa = of;
  {
    const std::lock_guard lock(runtime().census);
    ++runtime().live[of->name];
  }
  construct(of, object);
  return object;
}

// Its memory stays, so that whoever still uses it is caught.
void object_dispose(Id object) {
  for (ObjcClass* of = object->isa; of; of = of->super)
    for_methods(of, ".cxx_destruct",
                [&](Implementation each) { reinterpret_cast<void (*)(Id, ObjcSelector*)>(each)(object, nullptr); });
  const std::lock_guard lock(runtime().census);
  --runtime().live[object->isa->name];
  count_of(object) = dead;
}

Id objc_retain(Id object) {
  if (!object || is_tagged(object)) return object;
  // One on the stack is moved by objc_retainBlock alone.
  if (objc::is_block(object)) return objc::is_on_stack(object) ? object : static_cast<Id>(_Block_copy(object));
  if (is_for_ever(object)) return object;
  if (count_of(object)++ <= 0) objc::fail("a %s was used after it was gone", object->isa->name);
  return object;
}

void objc_release(Id object) {
  static ObjcSelector dealloc = {nullptr, nullptr};
  if (!object || is_tagged(object)) return;
  if (objc::is_block(object)) return _Block_release(object);
  if (is_for_ever(object)) return;
  const long left = --count_of(object);
  if (left < 0) objc::fail("a %s was released too often", object->isa->name);
  if (left > 0) return;
  if (!dealloc.name) {
    const std::unique_lock lock(runtime().mutex);
    dealloc.name = interned("dealloc");
  }
  reinterpret_cast<void (*)(Id, ObjcSelector*)>(objc_rt_lookup(object, &dealloc))(object, &dealloc);
}

Id objc_autorelease(Id object) {
  if (object && !is_for_ever(object)) pool().push_back(object);
  return object;
}

void* objc_autoreleasePoolPush() { return reinterpret_cast<void*>(pool().size() + 1); }
void objc_autoreleasePoolPop(void* place) {
  while (pool().size() > reinterpret_cast<size_t>(place) - 1) {
    const Id object = pool().back();
    pool().pop_back();
    objc_release(object);
  }
}

// The shortcuts between caller and callee are taken by nobody.
Id objc_autoreleaseReturnValue(Id object) { return objc_autorelease(object); }
Id objc_retainAutorelease(Id object) { return objc_autorelease(objc_retain(object)); }
Id objc_retainAutoreleaseReturnValue(Id object) { return objc_autorelease(objc_retain(object)); }
Id objc_retainAutoreleasedReturnValue(Id object) { return objc_retain(object); }
Id objc_unsafeClaimAutoreleasedReturnValue(Id object) { return object; }
Id objc_retainBlock(Id block) { return static_cast<Id>(_Block_copy(block)); }

void objc_storeStrong(Id* place, Id value) {
  objc_retain(value);
  const Id before = *place;
  *place = value;
  objc_release(before);
}

// ---- Properties -----------------------------------------------------------------------------------------------------

static Id* variable(Id object, ptrdiff_t offset) {
  return reinterpret_cast<Id*>(reinterpret_cast<char*>(object) + offset);
}

// What is copied here, strings and blocks, never changes.
Id objc_getProperty(Id object, ObjcSelector*, ptrdiff_t offset, bool) {
  return objc_autorelease(objc_retain(*variable(object, offset)));
}
void objc_setProperty(Id object, ObjcSelector*, ptrdiff_t offset, Id value, bool, bool) {
  objc_storeStrong(variable(object, offset), value);
}
void objc_setProperty_atomic(Id object, ObjcSelector*, Id value, ptrdiff_t offset) {
  objc_storeStrong(variable(object, offset), value);
}
void objc_setProperty_nonatomic(Id object, ObjcSelector*, Id value, ptrdiff_t offset) {
  objc_storeStrong(variable(object, offset), value);
}
void objc_setProperty_atomic_copy(Id object, ObjcSelector*, Id value, ptrdiff_t offset) {
  objc_storeStrong(variable(object, offset), value);
}
void objc_setProperty_nonatomic_copy(Id object, ObjcSelector*, Id value, ptrdiff_t offset) {
  objc_storeStrong(variable(object, offset), value);
}

void* objc_getProtocol(const char*) { return nullptr; }
void objc_exception_throw(Id) { objc::fail("@throw is not emulated"); }

__attribute__((visibility("default"))) long objc_rt_live(const char* prefix) {
  const std::lock_guard lock(runtime().census);
  long count = 0;
  for (const auto& [name, live] : runtime().live)
    if (name.rfind(prefix, 0) == 0) count += live;
  return count;
}

}  // extern "C"
