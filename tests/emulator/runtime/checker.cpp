#include "checker.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <bit>
#include <cstdio>

#include "execution.h"
#include "fiber.h"

namespace emulator {

// ---- What there is --------------------------------------------------------------------------------------------------

void Checker::begin_dispatch(Execution& execution) {
  buffers_.clear();
  if (library_end_) return;  // kernels and runtime are in one library
  struct Library {
    const void* base;
    uintptr_t begin, end;
  } library = {nullptr, ~uintptr_t{0}, 0};
  Dl_info info;
  if (!dladdr(reinterpret_cast<void*>(execution.kernel->entry), &info)) return;
  library.base = info.dli_fbase;
  dl_iterate_phdr(
      [](dl_phdr_info* object, size_t, void* found) {
        Library& wanted = *static_cast<Library*>(found);
        if (reinterpret_cast<const void*>(object->dlpi_addr) != wanted.base) return 0;
        for (int i = 0; i < object->dlpi_phnum; ++i) {
          const ElfW(Phdr) & segment = object->dlpi_phdr[i];
          if (segment.p_type != PT_LOAD) continue;
          wanted.begin = std::min<uintptr_t>(wanted.begin, object->dlpi_addr + segment.p_vaddr);
          wanted.end = std::max<uintptr_t>(wanted.end, object->dlpi_addr + segment.p_vaddr + segment.p_memsz);
        }
        return 1;
      },
      &library);
  library_begin_ = library.begin;
  library_end_ = library.end;
}

static bool begins_behind(uintptr_t address, const Region& region) { return address < region.begin; }

void Checker::add_buffer(Region region) {
  buffers_.insert(std::upper_bound(buffers_.begin(), buffers_.end(), region.begin, begins_behind), std::move(region));
}

void Checker::begin_group() {
  variable_count_ = 0;
  deliveries_.clear();
  ++era_;
}

void Checker::add_threadgroup_variable(char* place, uint32_t bytes, const char* name) {
  if (variable_count_ == variables_.size()) variables_.emplace_back();
  Region& region = variables_[variable_count_++];
  region.begin = reinterpret_cast<uintptr_t>(place);
  region.end = region.begin + bytes;
  region.space = threadgroup_space;
  region.name = name;
  region.written.assign(bytes, 0);
}

inline Region* Checker::region_of(uintptr_t address) {
  for (size_t i = 0; i < variable_count_; ++i)
    if (address >= variables_[i].begin && address < variables_[i].end) return &variables_[i];
  // Few buffers overlap, so it is mostly the first.
  auto behind = std::upper_bound(buffers_.begin(), buffers_.end(), address, begins_behind);
  while (behind != buffers_.begin())
    if (address < (--behind)->end) return &*behind;
  return nullptr;
}

// ---- Bounds ---------------------------------------------------------------------------------------------------------

// The thread's own stack, what the runtime tells it, constants of the library.
inline bool Checker::is_private(Execution& execution, const Access& access) {
  const auto within = [&](const void* begin, size_t bytes) {
    return access.address - reinterpret_cast<uintptr_t>(begin) < bytes;
  };
  if (within(execution.stacks, all_stacks)) {
    if (!within(execution.running->stack, stack_bytes))
      execution.problem(__LINE__, access.site, "another thread's private memory is used");
    return true;
  }
  if (within(&execution, sizeof execution)) return true;
  if (access.address < library_begin_ || access.address >= library_end_) return false;
  if (access.write) execution.problem(__LINE__, access.site, "program-scope memory is written");
  return true;
}

void Checker::out_of_bounds(Execution& execution, const Access& access) {
  const auto distance = [&](const Region& region) {
    if (access.address < region.begin) return region.begin - access.address;
    return access.address >= region.end ? access.address - region.end : 0;
  };
  const Region* nearest = nullptr;
  const auto consider = [&](const Region& region) {
    if (!nearest || distance(region) < distance(*nearest)) nearest = &region;
  };
  for (size_t i = 0; i < variable_count_; ++i) consider(variables_[i]);
  for (const Region& region : buffers_) consider(region);
  execution.problem(
      __LINE__, access.site,
      "out of bounds: %s of %u bytes at byte %ld of %s, which has %lu, by thread %u of threadgroup %u",
      access.write ? "write" : "read", access.bytes, nearest ? static_cast<long>(access.address - nearest->begin) : 0,
      nearest ? nearest->name : "nothing", nearest ? static_cast<unsigned long>(nearest->end - nearest->begin) : 0,
      execution.running->place.thread_index_in_threadgroup, execution.block->group);
  stop(execution);
}

// ---- Order ----------------------------------------------------------------------------------------------------------

// A division for every access would take longer than all the rest.
static uint32_t cluster_of(const Execution& execution, uint32_t group) {
  return execution.cluster == 1 ? group : group / execution.cluster;
}

static bool same_simdgroup(uint32_t a, uint32_t b) { return a / lanes == b / lanes; }

// Whether the running thread has awaited something at which that of `earlier` arrived later than that.
static bool has_heard(const Execution& execution, const Accesses& earlier) {
  const std::vector<Release>& heard = execution.later[execution.running->index].heard;
  return std::any_of(heard.begin(), heard.end(), [&](const Release& release) {
    return release.thread == earlier.thread && release.count > earlier.releases;
  });
}

// Whether everything in `earlier` happened before the running thread's access.
static bool ordered(const Execution& execution, Space space, const Accesses& earlier, bool reads_before_write) {
  const Thread& thread = *execution.running;
  const uint32_t group = execution.block->group;
  if (thread.clock.cluster_awaits > earlier.cluster_arrivals && !earlier.several_clusters &&
      cluster_of(execution, earlier.group) == cluster_of(execution, group))
    return true;
  if (earlier.several_groups || earlier.group != group) return false;
  if (earlier.barriers != execution.block->barriers[space]) return true;
  if (!earlier.several_threads && (earlier.thread == thread.index || has_heard(execution, earlier))) return true;
  if (earlier.several_simdgroups || !same_simdgroup(earlier.thread, thread.index)) return false;
  if (earlier.simdgroup_barriers != thread.clock.simdgroup_barriers[space]) return true;
  return reads_before_write && thread.clock.rendezvous > earlier.rendezvous;
}

static Accesses first_access(const Execution& execution, Space space, const Access& access, uint32_t site) {
  const Thread& thread = *execution.running;
  Accesses made;
  made.any = true;
  made.atomic = access.atomic;
  made.cluster_arrivals = thread.clock.cluster_arrivals;
  made.shown = thread.clock.shown;
  made.thread = thread.index;
  made.group = execution.block->group;
  made.barriers = execution.block->barriers[space];
  made.simdgroup_barriers = thread.clock.simdgroup_barriers[space];
  made.rendezvous = thread.clock.rendezvous;
  made.releases = thread.clock.releases;
  made.site = site;
  return made;
}

static void add_read(const Execution& execution, Accesses& reads, const Accesses& read) {
  const bool several_groups = reads.any && (reads.several_groups || reads.group != read.group);
  const bool several_clusters =
      reads.any && (reads.several_clusters || cluster_of(execution, reads.group) != cluster_of(execution, read.group));
  const uint8_t cluster_arrivals = std::max(reads.cluster_arrivals, read.cluster_arrivals);
  // Reads before a barrier of the same group, or of the one simdgroup that has read, are before whatever follows.
  const bool is_behind = !reads.several_simdgroups && same_simdgroup(reads.thread, read.thread) &&
                         reads.simdgroup_barriers < read.simdgroup_barriers;
  if (!reads.any || reads.group != read.group || reads.barriers != read.barriers || is_behind) {
    reads = read;
  } else {
    reads.atomic = reads.atomic && read.atomic;
    reads.several_threads = reads.several_threads || reads.thread != read.thread;
    reads.several_simdgroups = reads.several_simdgroups || !same_simdgroup(reads.thread, read.thread);
    reads.simdgroup_barriers = std::max(reads.simdgroup_barriers, read.simdgroup_barriers);
    reads.rendezvous = std::max(reads.rendezvous, read.rendezvous);
    if (read.releases > reads.releases) reads.releases = read.releases;
  }
  reads.several_groups = several_groups;
  reads.several_clusters = several_clusters;
  reads.cluster_arrivals = cluster_arrivals;
}

// The same where it is one more since the same barriers, as most are. False where it is not.
static bool add_one_more(const Execution& execution, Space space, Accesses& reads) {
  const Thread& thread = *execution.running;
  const Clock& clock = thread.clock;
  if (!reads.any || reads.atomic || reads.group != execution.block->group) return false;
  if (reads.barriers != execution.block->barriers[space]) return false;
  if (reads.simdgroup_barriers != clock.simdgroup_barriers[space]) return false;
  if (reads.thread != thread.index) {
    reads.several_threads = true;
    if (!same_simdgroup(reads.thread, thread.index)) reads.several_simdgroups = true;
  }
  reads.rendezvous = std::max(reads.rendezvous, clock.rendezvous);
  if (clock.releases > reads.releases) reads.releases = clock.releases;
  reads.cluster_arrivals = std::max(reads.cluster_arrivals, clock.cluster_arrivals);
  return true;
}

void Cells::Page::split(size_t wanted) {
  const int before = shift;
  shift = std::min(shift, std::countr_zero(wanted));
  std::vector<Cell> finer(page_bytes >> shift);
  if (!cells.empty())
    for (size_t i = 0; i < finer.size(); ++i) finer[i] = cells[i << shift >> before];
  cells = std::move(finer);
}

template <typename Each>
void Checker::each_cell(Region& region, uintptr_t address, uint32_t bytes, const Each& each) {
  region.cells.of(address - region.begin, bytes, [&](Cell& cell, size_t offset) {
    if (region.space == threadgroup_space && cell.era != era_) {
      cell = {};
      cell.era = era_;
    }
    each(cell, offset);
  });
}

void Checker::check_cell(Execution& execution, const Region& region, Cell& cell, size_t offset, const Access& access) {
  const auto race = [&](const Accesses& earlier, const char* what) {
    execution.problem(
        __LINE__, access.site,
        "data race on %s, byte %ld: %s by thread %u of threadgroup %u, and a %s by thread %u of threadgroup %u at @%lx",
        region.name, static_cast<long>(offset), access.write ? "write" : "read",
        execution.running->place.thread_index_in_threadgroup, execution.block->group, what,
        execution.threads[earlier.thread].place.thread_index_in_threadgroup, earlier.group,
        static_cast<unsigned long>(earlier.site));
  };
  if (cell.delivery) {
    if (!has_come(execution, region, cell, offset, access)) return;
  } else if (cell.write.any) {
    if (!(access.atomic && cell.write.atomic) && !ordered(execution, region.space, cell.write, false))
      race(cell.write, "write");
    else if (access.is_product && execution.threads[cell.write.thread].clock.shown == cell.write.shown)
      execution.problem(__LINE__, access.site, "a product reads what was written and not shown: %s, byte %ld",
                        region.name, static_cast<long>(offset));
  }
  if (access.write && cell.reads.any && !(access.atomic && cell.reads.atomic) &&
      !ordered(execution, region.space, cell.reads, true))
    race(cell.reads, "read");
  if (!access.write && add_one_more(execution, region.space, cell.reads)) return;
  const Accesses made = first_access(execution, region.space, access, static_cast<uint32_t>(this->offset(access.site)));
  if (access.write) {
    cell.write = made;
    cell.reads = {};
    cell.delivery = 0;
  } else {
    add_read(execution, cell.reads, made);
  }
}

void Checker::check_written(Execution& execution, Region& region, const Access& access) {
  const auto first = region.written.begin() + static_cast<ptrdiff_t>(access.address - region.begin);
  if (access.write) {
    std::fill_n(first, access.bytes, uint8_t{1});
  } else if (const auto missing = std::find(first, first + access.bytes, 0); missing != first + access.bytes) {
    execution.problem(__LINE__, access.site, "uninitialised threadgroup memory is read: %s, byte %ld", region.name,
                      static_cast<long>(missing - region.written.begin()));
  }
}

void Checker::access(Execution& execution, const Access& access) {
  if (is_private(execution, access)) return;
  Region* region = region_of(access.address);
  if (!region || access.address + access.bytes > region->end) return out_of_bounds(execution, access);
  if (access.write && region->read_only)
    execution.problem(__LINE__, access.site, "%s is read-only and is written", region->name);
  if (access.aligned && (access.address & (access.bytes - 1)))
    execution.problem(__LINE__, access.site, "misaligned %s of %u bytes at byte %ld of %s",
                      access.write ? "write" : "read", access.bytes, static_cast<long>(access.address - region->begin),
                      region->name);
  if (region->space == threadgroup_space) check_written(execution, *region, access);
  if (region->read_only) return;
  each_cell(*region, access.address, access.bytes,
            [&](Cell& cell, size_t offset) { check_cell(execution, *region, cell, offset, access); });
}

// ---- Copies that come by themselves ---------------------------------------------------------------------------------

constexpr uint32_t is_arrival = ~0u;  // in place of a cell's delivery

// Whether the copies of which the cell's last write is are there for the running thread.
bool Checker::has_come(Execution& execution, const Region& region, const Cell& cell, size_t offset,
                       const Access& access) {
  const auto problem = [&](int kind, const char* what) {
    execution.problem(kind, access.site, "%s of %s, byte %ld, %s", access.write ? "write" : "read", region.name,
                      static_cast<long>(offset), what);
    return false;
  };
  if (cell.delivery == is_arrival) return problem(__LINE__, "which is an arrival");
  const Delivery& delivery = deliveries_[cell.delivery - 1];
  if (!delivery.has_come) return problem(__LINE__, "while a copy to it is under way");
  const std::vector<uint32_t>& turns = execution.of_running().turns;
  const bool has_awaited = turns.size() > delivery.arrival && turns[delivery.arrival] > delivery.turn;
  if (has_awaited || delivery.barriers != execution.block->barriers[threadgroup_space]) return true;
  return problem(__LINE__, "which was copied, and the thread has not awaited it");
}

void Checker::hold_arrival(Execution& execution, const void* place, const void* site) {
  const auto address = reinterpret_cast<uintptr_t>(place);
  access(execution, {address, 8, true, false, true, site});
  Region* region = region_of(address);
  if (!region || region->space != threadgroup_space)
    return execution.problem(__LINE__, site, "an arrival that is not in shared memory");
  each_cell(*region, address, 8, [](Cell& cell, size_t) { cell.delivery = is_arrival; });
}

void Checker::forgive(const void* place, uint32_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(place);
  if (Region* region = region_of(address); region && region->space == threadgroup_space && bytes > 0)
    std::fill_n(region->written.begin() + static_cast<ptrdiff_t>(address - region->begin),
                std::min<size_t>(bytes, region->end - address), uint8_t{1});
}

uint32_t Checker::add_delivery(uint32_t arrival, uint32_t turn) {
  deliveries_.push_back({arrival, turn});
  return static_cast<uint32_t>(deliveries_.size());
}

void Checker::begin_copy(Execution& execution, void* to, uint32_t bytes, uint32_t delivery, const void* site) {
  const auto address = reinterpret_cast<uintptr_t>(to);
  access(execution, {address, bytes, true, false, false, site});
  Region* region = region_of(address);
  if (!region || region->space != threadgroup_space)
    return execution.problem(__LINE__, site, "a copy to what is no shared memory");
  std::fill_n(region->written.begin() + static_cast<ptrdiff_t>(address - region->begin), bytes, uint8_t{0});
  each_cell(*region, address, bytes, [&](Cell& cell, size_t) { cell.delivery = delivery; });
}

void Checker::end_copy(Execution& execution, void* to, uint32_t bytes, uint32_t delivery) {
  forgive(to, bytes);
  deliveries_[delivery - 1].has_come = true;
  deliveries_[delivery - 1].barriers = execution.block->barriers[threadgroup_space];
}

}  // namespace emulator
