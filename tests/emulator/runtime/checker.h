// Every load and store of a kernel held against what is bound, what was written, and who else was there.
//
// Two accesses of one place, one of them a write and not both atomic, must be ordered: by a threadgroup barrier for
// that kind of memory, or within a simdgroup by a simdgroup barrier for it. A read is also before every write that its
// simdgroup makes after a later exchange. Nothing orders threadgroups of one dispatch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulator {

struct Execution;

enum Space { device_space, threadgroup_space };

// What has happened before a thread's next access.
struct Clock {
  uint32_t simdgroup_barriers[2] = {};  // passed, by Space
  uint32_t rendezvous = 0;              // the last that its simdgroup had
};

// The last write of a place, or the reads since then.
struct Accesses {
  bool any = false;
  bool atomic = false;  // all of them
  bool several_threads = false;
  bool several_simdgroups = false;
  bool several_groups = false;
  uint32_t thread = 0;
  uint32_t group = 0;
  uint32_t barriers = 0;  // passed by the group
  uint32_t simdgroup_barriers = 0;
  uint32_t rendezvous = 0;
  const void* site = nullptr;
};

struct Cell {
  uint32_t era = 0;  // of the threadgroup, for threadgroup memory
  Accesses write;
  Accesses reads;
};

// The cells of a region. They come when one of their neighbours is first used, because memory may be large.
class Cells {
 public:
  void resize(size_t count) { pages_.resize(count / page + 1); }
  bool empty() const { return pages_.empty(); }
  Cell& operator[](size_t i) {
    std::vector<Cell>& cells = pages_[i / page];
    if (cells.empty()) cells.resize(page);
    return cells[i % page];
  }

 private:
  static constexpr size_t page = 1024;
  std::vector<std::vector<Cell>> pages_;
};

struct Region {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  Space space = device_space;
  bool read_only = false;
  uint32_t granule = 4;  // bytes that one thread writes at once: no more than an element
  const char* name = "";
  Cells cells;                   // one for each granule, unless read-only
  std::vector<uint8_t> written;  // of each byte of threadgroup memory
};

struct Access {
  uintptr_t address;
  uint32_t bytes;
  bool write;
  bool atomic;
  bool aligned;  // the compiler counts on it
  const void* site;
};

class Checker {
 public:
  void begin_dispatch(Execution& execution);
  void add_buffer(Region region);
  void begin_group();
  void add_threadgroup_variable(char* place, uint32_t bytes, uint32_t alignment, const char* name);
  void access(Execution& execution, const Access& access);
  // Of a place in the library's code, from its beginning.
  uintptr_t offset(const void* site) const { return reinterpret_cast<uintptr_t>(site) - library_begin_; }

 private:
  Region* region_of(uintptr_t address);
  bool is_private(Execution& execution, const Access& access);
  void out_of_bounds(Execution& execution, const Access& access);
  void check_written(Execution& execution, Region& region, const Access& access);
  void check_cell(Execution& execution, Region& region, Cell& cell, const Access& access);

  std::vector<Region> buffers_;
  std::vector<Region> variables_;  // of the group; kept from one to the next for their memory
  size_t variable_count_ = 0;
  uint32_t era_ = 0;
  uintptr_t library_begin_ = 0;
  uintptr_t library_end_ = 0;
};

}  // namespace emulator
