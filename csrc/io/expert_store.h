// The routed experts of a store: where the bytes of each lie, and where they land in a slot.
//
// A packed store has an expert in one stretch of bytes, so one read brings it. An MLX store has the pieces of an expert
// (usually nine) in stacked tensors, and each piece is a read of its own; a published checkpoint and a GGUF file have
// three. Where rows of gate and up alternate, one read brings both, and they are taken apart on their way. In a slot,
// each piece has one place for every expert of a store, with room for the largest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "format/store_directory.h"
#include "io/read_pool.h"
#include "io/reader.h"

namespace moeflux {

// Every piece starts at a multiple of this: a cache line, and the widest vector a kernel loads.
constexpr int64_t piece_alignment = 64;

struct SlotLayout {
  std::vector<int64_t> offsets;  // from the start of the slot; in the order of ExpertLayout::pieces
  int64_t bytes = 0;             // of a slot: a multiple of direct_alignment
};

// The slot layout of a store, and the bounce buffer that a reading thread needs for it in a mode (0 when every read
// goes straight into place), be it for experts or for rows of n-gram tables. Both follow from the directory; no file is
// opened.
SlotLayout slot_layout(const StoreDirectory& store);
int64_t bounce_of(const StoreDirectory& store, ReadMode mode);

struct ExpertStoreOptions {
  ReadMode mode = ReadMode::buffered;
  ReaderFactory open = file_readers();
};

// Immutable once open; used from several threads at once. Must outlive the batches its reads were added to.
class ExpertStore {
 public:
  // Opens the files that hold experts. IoError when one cannot be opened or is shorter than the directory says.
  explicit ExpertStore(const StoreDirectory& store, const ExpertStoreOptions& options = {});

  const ExpertLayout& experts(int64_t layer) const {
    return layouts_.empty() ? layout_ : layouts_[static_cast<size_t>(layer)];
  }
  const ExpertLayout& largest() const { return layout_; }  // of the layers' experts
  const SlotLayout& slot() const { return slot_; }
  int64_t layers() const { return static_cast<int64_t>(places_.size()); }  // dense ones included
  // The model's number of a layer, for messages: it is another one where these are the layers of a part.
  int64_t number(int64_t layer) const { return layers_before_ + layer; }
  int64_t experts_per_layer() const { return experts_per_layer_; }
  bool has_experts(int64_t layer) const;         // `layer` may be any number
  const std::string& path(int64_t layer) const;  // a file that holds its experts, for messages
  bool contiguous() const { return contiguous_; }
  ReadMode mode() const { return mode_; }
  // The bounce buffer that a reading thread needs for this store and mode, 0 when every read goes straight into place.
  int64_t bounce() const { return bounce_; }

  // Adds the reads that bring an expert into `slot` (slot().bytes long, aligned to direct_alignment). They are cut at
  // blocks, or at pairs of rows, into about `parts` equal pieces, which as many threads can share when there is little
  // else to read. Returns the bytes that they bring. std::out_of_range when the layer has no such expert.
  int64_t add_reads(int64_t layer, int64_t expert, const Landing& slot, ReadBatch& batch, int64_t parts = 1) const;

  // IoError naming a file that is no longer what was opened: truncated, grown, written to, replaced or gone. It takes
  // one stat per file. Called at the end of a call that has read, before anybody sees the result.
  void check_unchanged() const;
  // What all threads have read since it was opened.
  ReadCounts counts() const;

 private:
  struct Place {
    ExpertPlace stored;
    int64_t landing = 0;  // in the slot
    int64_t bytes = 0;    // of both matrices where their rows alternate
    int64_t apart = 0;    // from there to where the second matrix's rows land
  };

  void open_files(const StoreDirectory& store, const ExpertStoreOptions& options);
  std::vector<Place> places_of(const StoreDirectory& store, int64_t layer) const;
  void check_lengths() const;

  ExpertLayout layout_;
  std::vector<ExpertLayout> layouts_;  // [layer], where they differ; or empty
  SlotLayout slot_;
  int64_t experts_per_layer_ = 0;
  int64_t layers_before_ = 0;
  bool contiguous_ = false;
  ReadMode mode_;
  int64_t bounce_ = 0;
  std::vector<std::unique_ptr<Reader>> readers_;  // by file of the directory; null where it holds no expert
  std::vector<std::vector<Place>> places_;        // [layer]: one place if experts are contiguous, else one per piece
};

}  // namespace moeflux
