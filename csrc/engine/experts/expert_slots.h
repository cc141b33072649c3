// The memory that experts are read into: the slots, the expert in each, the threads that read, and the files. Where
// there are host slots, they are between the two.
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"
#include "backend/mirror.h"
#include "engine/experts/expert_matrices.h"
#include "engine/experts/host_slots.h"
#include "engine/experts/slot_staging.h"
#include "format/store_directory.h"
#include "io/expert_loader.h"
#include "io/expert_store.h"
#include "io/read_pool.h"
#include "io/slot_cache.h"
#include "moeflux.h"

namespace moeflux {

class ExpertSlots {
 public:
  // `options` are resolved.
  ExpertSlots(const StoreDirectory& store, Backend& backend, const EngineOptions& options, const ReaderFactory& open);

  // Bytes of the slots: planned with resolved options, and held. `shared`: whether host and device share memory.
  static int64_t planned_bytes(const StoreDirectory& store, const EngineOptions& options, bool shared);
  int64_t bytes() const { return memory_->bytes(); }
  // Bytes of the host's memory that a device with memory of its own needs, likewise.
  static int64_t planned_staging(const StoreDirectory& store, const EngineOptions& options);
  int64_t staging() const;
  // Bytes of lists, likewise.
  static int64_t planned_tables(const StoreDirectory& store, const EngineOptions& options);
  int64_t tables() const;
  // Bytes of slots in the host's memory, likewise.
  static int64_t planned_host_bytes(const StoreDirectory& store, const EngineOptions& options);
  int64_t host_bytes() const { return host_ ? host_->bytes() : 0; }

  const ExpertStore& store() const { return store_; }
  SlotCache& cache() { return cache_; }
  const SlotCache& cache() const { return cache_; }
  const ReadPool& pool() const { return pool_; }
  ReadPool& pool() { return pool_; }
  ExpertLoader& loader() { return loader_; }

  int64_t count() const { return cache_.shape().slots; }
  int64_t host_count() const { return host_ ? host_->count() : 0; }
  // Those of them that have an expert; asked from any thread.
  int64_t filled() const { return cache_.filled(); }
  int64_t filled_of_host() const { return host_ ? host_->filled() : 0; }
  // Of the copy that an expert comes by, if the loader says that it is copied.
  const Ticket& copy_to(const Lease& lease) const { return host_->copy_to(lease.slot()); }
  // Forgets every expert that nobody holds.
  void drop_all();
  // Whether an expert is in its slot for good, once it is there.
  bool stay() const { return stay_; }
  // If there is a slot for every expert, or if the device has memory of its own, the slots are followed by a table for
  // each layer: u64 [experts], the first byte of each expert.
  Mirrored table(int64_t layer) const;
  ExpertMatrices matrices(int64_t layer, int64_t slot) const;
  // Of the host's slots, if there are any: the same, the copy of a slot to one of the device, whether an expert is
  // ready there, and a lease on its slot if it is.
  ExpertMatrices host_matrices(int64_t layer, int64_t slot) const;
  CopyArgs copy_from_host(int64_t from, int64_t to) const;
  bool ready_on_host(int64_t layer, int64_t expert) const { return host_->lower().ready(layer, expert); }
  Lease lease_on_host(int64_t layer, int64_t expert) { return host_->lower().cache().acquire(layer, expert).lease; }

  // Bytes per second that a pool like this one gets when it does nothing but read random experts for about this long.
  double read_rate(double seconds) const;
  std::string describe() const;  // "32 expert slots, 64 host slots, 4 readers, direct reads"

 private:
  ExpertStore store_;
  std::unique_ptr<Buffer> memory_;
  std::unique_ptr<Buffer> table_;  // the host's side of the tables, where it has one
  SlotStaging staging_;
  SlotCache cache_;
  ReadPool pool_;
  ExpertCheck check_;
  std::unique_ptr<HostSlots> host_;  // null: none
  ExpertLoader loader_;
  int64_t checksums_;  // bytes
  bool stay_;
};

}  // namespace moeflux
