// Every load and store of a kernel held against what is bound, what was written, and who else was there.
//
// Two accesses of one place, one of them a write and not both atomic, must be ordered: by a threadgroup barrier for
// that kind of memory, or within a simdgroup by a simdgroup barrier for it. A read is also before every write that its
// simdgroup makes after a later exchange. What a thread does before it arrives somewhere is before whatever those do
// who have awaited that. Nothing but the barriers of clusters orders threadgroups of one dispatch.
//
// A copy that comes by itself is a write of the thread that asks for it. Until it is there nobody may touch the place;
// then it is before whatever those do who have awaited it, or have passed a threadgroup barrier since somebody had.
#pragma once
#include <algorithm>
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
  uint32_t releases = 0;                // so often others were told of what it has done
  uint16_t shown = 0;                   // so often what it has written was shown to products
  uint8_t cluster_arrivals = 0;
  uint8_t cluster_awaits = 0;
};

// What a thread had done when it arrived somewhere.
struct Release {
  uint32_t thread;
  uint32_t count;  // its Clock::releases
};

// The last write of a place, or the reads since then.
struct Accesses {
  bool any : 1 = false;
  bool atomic : 1 = false;  // all of them
  bool several_threads : 1 = false;
  bool several_simdgroups : 1 = false;
  bool several_groups : 1 = false;
  bool several_clusters : 1 = false;
  uint8_t cluster_arrivals = 0;
  uint16_t shown = 0;
  uint32_t thread : 12 = 0;
  uint32_t releases : 20 = 0;
  uint32_t group = 0;
  uint32_t barriers = 0;  // passed by the group
  uint32_t simdgroup_barriers = 0;
  uint32_t rendezvous = 0;
  uint32_t site = 0;  // Checker::offset of it
};

// As long as a line of the CPU's cache: most of the time goes to the cells, because there are so many.
struct alignas(64) Cell {
  uint32_t era = 0;       // of the threadgroup, for threadgroup memory
  uint32_t delivery = 0;  // the copies of which the last write is; 0: it is of a thread
  Accesses write;
  Accesses reads;
};
static_assert(sizeof(Cell) == 64);

// The cells of a region, page by page. A page comes when something of it is first used, because memory may be large.
// Its cells stand for as many bytes as are used at once there: when fewer are, each becomes several.
class Cells {
 public:
  // Calls each(cell, its offset) for those of some bytes.
  template <typename Each>
  void of(size_t offset, size_t bytes, const Each& each) {
    if (const size_t pages = (offset + bytes + page_bytes - 1) / page_bytes; pages > pages_.size())
      pages_.resize(pages);
    const size_t together = (offset | bytes) & -(offset | bytes);  // the largest power of 2 that divides both
    for (const size_t end = offset + bytes; offset < end;) {
      Page& page = pages_[offset / page_bytes];
      page.make_as_fine_as(together);
      const size_t stop = std::min(end, (offset / page_bytes + 1) * page_bytes);
      Cell* cell = &page.cells[offset % page_bytes >> page.shift];
      for (; offset < stop; offset += size_t{1} << page.shift) each(*cell++, offset);
    }
  }

 private:
  static constexpr size_t page_bytes = 1024;
  struct Page {
    int shift = 4;  // of the bytes of a cell, a power of 2
    std::vector<Cell> cells;

    void make_as_fine_as(size_t wanted) {
      if (cells.empty() || wanted >> shift == 0) split(wanted);
    }
    void split(size_t wanted);
  };
  std::vector<Page> pages_;
};

struct Region {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  Space space = device_space;
  bool read_only = false;
  const char* name = "";
  Cells cells;                   // unused if read-only
  std::vector<uint8_t> written;  // of each byte of threadgroup memory
};

struct Access {
  uintptr_t address;
  uint32_t bytes;
  bool write;
  bool atomic;
  bool aligned;  // the compiler counts on it
  const void* site;
  bool is_product = false;
};

// Copies that come together, by themselves.
struct Delivery {
  uint32_t arrival;  // its number in the threadgroup
  uint32_t turn;
  bool has_come = false;
  uint32_t barriers = 0;  // that the threadgroup had passed when somebody had awaited them
};

class Checker {
 public:
  void begin_dispatch(Execution& execution);
  void add_buffer(Region region);  // cheap for many when they come in the order of their addresses
  void begin_group();
  void add_threadgroup_variable(char* place, uint32_t bytes, const char* name);
  void access(Execution& execution, const Access& access);
  // Nobody may read or write it as he does other memory.
  void hold_arrival(Execution& execution, const void* place, const void* site);
  // Whoever reads these bytes counts on nothing.
  void forgive(const void* place, uint32_t bytes);
  uint32_t add_delivery(uint32_t arrival, uint32_t turn);
  void begin_copy(Execution& execution, void* to, uint32_t bytes, uint32_t delivery, const void* site);
  void end_copy(Execution& execution, void* to, uint32_t bytes, uint32_t delivery);
  // Of a place in the library's code, from its beginning.
  uintptr_t offset(const void* site) const { return reinterpret_cast<uintptr_t>(site) - library_begin_; }

 private:
  Region* region_of(uintptr_t address);
  bool is_private(Execution& execution, const Access& access);
  void out_of_bounds(Execution& execution, const Access& access);
  void check_written(Execution& execution, Region& region, const Access& access);
  bool has_come(Execution& execution, const Region& region, const Cell& cell, size_t offset, const Access& access);
  void check_cell(Execution& execution, const Region& region, Cell& cell, size_t offset, const Access& access);
  template <typename Each>
  void each_cell(Region& region, uintptr_t address, uint32_t bytes, const Each& each);

  std::vector<Region> buffers_;    // by their beginning
  std::vector<Region> variables_;  // of the group; kept from one to the next for their memory
  size_t variable_count_ = 0;
  std::vector<Delivery> deliveries_;  // of the group
  uint32_t era_ = 0;
  uintptr_t library_begin_ = 0;
  uintptr_t library_end_ = 0;
};

}  // namespace emulator
