#include "engine/experts/expert_slots.h"

#include <random>

#include "core/arena.h"
#include "core/error.h"
#include "core/sha256.h"
#include "core/text.h"
#include "engine/experts/chosen_reads.h"
#include "engine/footprint.h"
#include "io/probe.h"

namespace moeflux {
namespace {

bool has_slots_for_all(const StoreDirectory& store, const EngineOptions& options) {
  return options.expert_slots == all_experts(store.variant);
}

ReadMode read_mode(const StoreDirectory& store, const EngineOptions& options) {
  const bool streams = !has_slots_for_all(store, options) || has_tables(store.variant);
  return chosen_reads(options.reads, {streams, options.reads == Reads::automatic && supports_direct(store)}).mode;
}

// Compares an expert that was read with the store's checksum, which is over its pieces, one after the other.
ExpertCheck expert_check(const StoreDirectory& store, const ExpertStore& experts, SlotStaging& staging,
                         const EngineOptions& options) {
  if (!options.verify_reads) return {};
  if (store.expert_checksums.empty())
    throw ArgumentError(
        concat("verify_reads: expected a store with a checksum of every expert, one that `moeflux convert` "
               "or `moeflux synth` wrote, found ",
               printable(store.listing), " without"));
  const auto sums = std::make_shared<const ExpertChecksums>(store.expert_checksums);
  return [&experts, &staging, sums](int64_t layer, int64_t expert, const Landing& slot) {
    Sha256 hash;
    staging.show(slot, [&](std::span<const std::byte> bytes) {
      const std::vector<ExpertPiece>& pieces = experts.experts(layer).pieces;
      for (size_t i = 0; i < pieces.size(); ++i)
        hash.add(bytes.subspan(static_cast<size_t>(experts.slot().offsets[i]), static_cast<size_t>(pieces[i].bytes)));
    });
    const Sha256Sum found = hash.sum();
    const Sha256Sum& expected = sums->at(static_cast<size_t>(layer)).at(static_cast<size_t>(expert));
    if (found != expected)
      throw IoError(concat(printable(experts.path(layer)), ": layer ", experts.number(layer), " expert ", expert,
                           ": expected the SHA-256 ", hex(expected), ", found ", hex(found),
                           ": the file is damaged, or the disk gave other bytes than it holds"));
  };
}

int64_t checksum_bytes(const StoreDirectory& store, const EngineOptions& options) {
  return options.verify_reads ? all_experts(store.variant) * static_cast<int64_t>(sizeof(Sha256Sum)) : 0;
}

SlotCacheShape cache_shape(const StoreDirectory& store, const EngineOptions& options) {
  return {store.variant.all_layers(), store.variant.experts().count, options.expert_slots, slot_layout(store).bytes};
}

SlotCacheShape host_shape(const StoreDirectory& store, const EngineOptions& options) {
  SlotCacheShape shape = cache_shape(store, options);
  shape.slots = options.host_slots;
  return shape;
}

LoaderShape loader_shape(const StoreDirectory& store, const EngineOptions& options, const SlotCacheShape& shape) {
  return {shape.slots, shape.experts, static_cast<int64_t>(store.experts.pieces.size()), options.readers};
}

// The part of the slots' memory that the host reaches.
std::span<std::byte> host_memory(const Backend& backend, const Buffer& slots, int64_t bytes) {
  if (!backend.shares_memory()) return {};
  return {slots.host(), static_cast<size_t>(bytes)};
}

int64_t table_bytes(const StoreDirectory& store, const EngineOptions& options, bool shared) {
  const SlotCacheShape shape = cache_shape(store, options);
  return has_slots_for_all(store, options) || !shared ? shape.layers * shape.experts * 8 : 0;
}

}  // namespace

ExpertSlots::ExpertSlots(const StoreDirectory& store, Backend& backend, const EngineOptions& options,
                         const ReaderFactory& open)
    : store_(store, {read_mode(store, options), open}),
      memory_(backend.allocate(planned_bytes(store, options, backend.shares_memory()), Memory::device, "expert slots")),
      staging_(backend, *memory_, options.readers, store_.slot().bytes, options.verify_reads),
      cache_(host_memory(backend, *memory_, options.expert_slots * store_.slot().bytes), cache_shape(store, options),
             options.cache),
      pool_(options.readers, bounce_of(store, store_.mode()), staging_.rooms(), staging_.carry()),
      check_(expert_check(store, store_, staging_, options)),
      host_(options.host_slots ? std::make_unique<HostSlots>(store_, pool_, host_shape(store, options), options.cache,
                                                             backend, *memory_, options.expert_slots, check_)
                               : nullptr),
      loader_(store_, pool_, cache_, check_, host_ ? &host_->lower() : nullptr),
      checksums_(checksum_bytes(store, options)),
      stay_(has_slots_for_all(store, options) && options.cache != CachePolicy::none) {
  if (!backend.shares_memory())
    table_ = backend.allocate(table_bytes(store, options, false), Memory::staging, "table of slots");
}

int64_t ExpertSlots::planned_bytes(const StoreDirectory& store, const EngineOptions& options, bool shared) {
  const SlotCacheShape shape = cache_shape(store, options);
  return shape.slots * shape.slot_bytes + table_bytes(store, options, shared);
}

int64_t ExpertSlots::planned_host_bytes(const StoreDirectory& store, const EngineOptions& options) {
  const SlotCacheShape shape = host_shape(store, options);
  return shape.slots * shape.slot_bytes;
}

int64_t ExpertSlots::tables() const {
  return cache_.tables() + loader_.tables() + checksums_ + (host_ ? host_->tables() : 0);
}

void ExpertSlots::drop_all() {
  cache_.drop_all();
  if (host_) host_->lower().cache().drop_all();
}

int64_t ExpertSlots::planned_staging(const StoreDirectory& store, const EngineOptions& options) {
  return SlotStaging::planned_bytes(options.readers, slot_layout(store).bytes, options.verify_reads) +
         arena_bytes(table_bytes(store, options, false));
}

int64_t ExpertSlots::staging() const { return staging_.bytes() + (table_ ? arena_bytes(table_->bytes()) : 0); }

int64_t ExpertSlots::planned_tables(const StoreDirectory& store, const EngineOptions& options) {
  const SlotCacheShape shape = cache_shape(store, options);
  const SlotCacheShape host = host_shape(store, options);
  const int64_t below =
      host.slots == 0 ? 0
                      : HostSlots::planned_tables(host, options.cache, loader_shape(store, options, host), shape.slots);
  return SlotCache::planned_tables(shape, options.cache) +
         ExpertLoader::planned_tables(loader_shape(store, options, shape)) + checksum_bytes(store, options) + below;
}

Mirrored ExpertSlots::table(int64_t layer) const {
  const SlotCacheShape& shape = cache_.shape();
  const int64_t place = layer * shape.experts * 8;
  const View device = {memory_.get(), shape.slots * shape.slot_bytes + place};
  return {device, table_ ? View{table_.get(), place} : device};
}

ExpertMatrices ExpertSlots::matrices(int64_t layer, int64_t slot) const {
  return expert_matrices(store_, layer, {memory_.get(), slot * store_.slot().bytes});
}

ExpertMatrices ExpertSlots::host_matrices(int64_t layer, int64_t slot) const {
  return expert_matrices(store_, layer, host_->slot(slot));
}

CopyArgs ExpertSlots::copy_from_host(int64_t from, int64_t to) const {
  return {host_->slot(from), {memory_.get(), to * store_.slot().bytes}, store_.slot().bytes};
}

double ExpertSlots::read_rate(double seconds) const {
  const ProbeRate rate = probe_reads(pieces_of(store_), pool_.threads(), seconds, std::random_device()(), [] {});
  return rate.seconds > 0 ? static_cast<double>(rate.bytes) / rate.seconds : 0;
}

std::string ExpertSlots::describe() const {
  const std::string below = host_ ? concat(host_count(), " host slots, ") : "";
  return concat(count(), " expert slots, ", below, pool_.threads(), " readers, ",
                store_.mode() == ReadMode::direct ? "direct" : "buffered", " reads");
}

}  // namespace moeflux
