// For tests: a system that refuses. Linked into a _core of its own, these stand where the system's functions stand in
// the shipped one; the n-th call from now of one of them fails, as it would where there is no more of what it gives.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

struct Calls {
  std::atomic<int64_t> made{0};
  std::atomic<int64_t> refused{-1};

  bool refuses() { return made.fetch_add(1) == refused.load(); }
};

enum Kind { memory, mappings, threads, kinds };  // as in tests/refusing/__init__.py

Calls calls[kinds];

template <typename Function>
Function* of_the_system(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

void* or_throw(void* found) {
  if (!found) throw std::bad_alloc();
  return found;
}

}  // namespace

#define MOEFLUX_EXPORT extern "C" __attribute__((visibility("default")))

// Call number `at` from now on of this kind is refused, and no other; -1: none. Returns the calls since this was told
// last.
MOEFLUX_EXPORT int64_t moeflux_refuse(int kind, int64_t at) {
  calls[kind].refused = at;
  return calls[kind].made.exchange(0);
}

// The other forms of the standard library come down to these.
void* operator new(std::size_t size) { return or_throw(calls[memory].refuses() ? nullptr : std::malloc(size + !size)); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  const auto step = static_cast<std::size_t>(alignment);
  return or_throw(calls[memory].refuses() ? nullptr : std::aligned_alloc(step, (size + step - 1) / step * step));
}
void operator delete(void* found) noexcept { std::free(found); }
void operator delete(void* found, std::size_t) noexcept { std::free(found); }
void operator delete(void* found, std::align_val_t) noexcept { std::free(found); }
void operator delete(void* found, std::size_t, std::align_val_t) noexcept { std::free(found); }

extern "C" void* mmap(void* address, size_t bytes, int protection, int flags, int descriptor, off_t offset) noexcept {
  static auto* const real = of_the_system<decltype(mmap)>("mmap");
  if (!calls[mappings].refuses()) return real(address, bytes, protection, flags, descriptor, offset);
  errno = ENOMEM;
  return MAP_FAILED;
}

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
                              void* argument) noexcept {
  static auto* const real = of_the_system<decltype(pthread_create)>("pthread_create");
  return calls[threads].refuses() ? EAGAIN : real(thread, attributes, body, argument);
}
