// How fast a disk gives experts: random reads of one expert's size, through the readers and the pool of the engine.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "io/expert_store.h"
#include "io/read_pool.h"
#include "io/reader.h"

namespace moeflux {

// What can be read, in pieces that are wanted one at a time.
struct ProbeSource {
  int64_t pieces = 0;
  int64_t piece_bytes = 0;  // room for one, a multiple of direct_alignment
  int64_t bounce = 0;       // bytes that each reading thread needs
  // Adds the reads of a piece; returns the bytes they bring.
  std::function<int64_t(int64_t piece, std::span<std::byte> into, ReadBatch& batch)> add;
};

// A file cut into pieces, the last of which may be left out; `reader` must outlive the source.
ProbeSource pieces_of(Reader& reader, int64_t piece_bytes);
// The experts of a store, likewise.
ProbeSource pieces_of(const ExpertStore& store);

struct ProbeRate {
  int64_t reads = 0;  // how many pieces were read
  int64_t bytes = 0;
  double seconds = 0;
};

// Reads pieces in a shuffled order, at least one and each at most once, until the time is up or none is left. It keeps
// `readers` threads at work. It calls `interruption` now and then, and what that throws passes through.
//
// The pieces land in so many rooms, one after the other: two for each thread at least. So few stay in the processor's
// caches, and what the page cache has is copied there faster than to as many slots as an engine has.
ProbeRate probe_reads(const ProbeSource& source, int readers, double seconds, uint64_t seed,
                      const std::function<void()>& interruption, int64_t rooms = 0);

}  // namespace moeflux
