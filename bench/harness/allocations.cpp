// Counts every operator new of the process: a decode step should make none.
#include <atomic>
#include <cstdlib>
#include <new>

#include "machine.h"

namespace {

std::atomic<int64_t> count{0};

void* counted(void* memory) {
  if (!memory) throw std::bad_alloc();
  count.fetch_add(1, std::memory_order_relaxed);
  return memory;
}

}  // namespace

// The other forms of the standard library come down to these.
void* operator new(std::size_t size) { return counted(std::malloc(size ? size : 1)); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  const auto step = static_cast<std::size_t>(alignment);
  return counted(std::aligned_alloc(step, (size + step - 1) / step * step));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

int64_t bench::allocations() { return count.load(std::memory_order_relaxed); }
