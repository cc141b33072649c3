// Rows of the n-gram table of one layer, which is far larger than memory: read one by one as they are needed, by the
// threads that read experts, and kept as long as there is room.
//
// A pass asks for its rows before it computes anything, and takes them when it comes to the layer. What the next pass
// of a prompt needs is known then, too, and is read while this one computes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/lists.h"
#include "format/store_directory.h"
#include "io/read_pool.h"
#include "io/reader.h"

namespace moeflux {

class NgramRows {
 public:
  // As many rows as two passes need, this one and the next.
  static constexpr int64_t capacity(int64_t most) { return 2 * most + 1; }
  static int64_t row_bytes(const StoreDirectory& store, int64_t layer);
  static int64_t planned_tables(int64_t most);

  // `memory` has capacity(most) rows, and outlives this, as does the pool. IoError when a file cannot be opened or is
  // shorter than the directory says.
  NgramRows(const StoreDirectory& store, int64_t layer, int64_t most, std::span<std::byte> memory, ReadPool& pool,
            ReadMode mode, const ReaderFactory& open);
  ~NgramRows() { abandon(); }

  struct Asked {
    int64_t hits = 0;    // in memory, or on their way
    int64_t misses = 0;  // whose reads begin now
  };

  int64_t row_bytes() const { return row_bytes_; }
  // Begins a pass that needs these rows, at most `most`. Those that are read already are demanded from now on.
  Asked begin(std::span<const int64_t> rows);
  // Waits for all reads under way, and writes these rows, which `begin` was given, one after another. IoError when a
  // read failed; then the rows that were on their way are forgotten.
  void take(std::span<const int64_t> rows, float* out);
  // Begins to read rows, at most `most`, that the next pass will need. Only after `take`.
  Asked look_ahead(std::span<const int64_t> rows);
  // Gives up what is on its way.
  void abandon() noexcept;

  // IoError when rows were read since the last time and a file is no longer what was opened. Then no row is kept.
  void check_unchanged();
  int64_t tables() const;

 private:
  struct Part {
    Reader* reader = nullptr;
    int64_t offset = 0;
  };
  struct Slot {
    int64_t row = -1;
    int64_t next = -1;  // slot of the same bucket
    int64_t pass = 0;   // the last one that needed it
    bool is_ready = false;
    bool was_used = false;  // since the hand has passed it
  };
  struct Lists {
    std::vector<Slot> slots;
    std::vector<int64_t> buckets;  // the first slot of each
    std::vector<int64_t> pending;  // slots whose reads are under way

    template <typename Self, typename Visit>
    static void each(Self& lists, int64_t most, const Visit& visit) {
      visit(lists.slots, capacity(most));
      visit(lists.buckets, capacity(most));
      visit(lists.pending, capacity(most));
    }
  };

  Asked ask(std::span<const int64_t> rows, ReadBatch& batch);
  int64_t& bucket(int64_t row) { return lists_.buckets[static_cast<size_t>(row) % lists_.buckets.size()]; }
  Slot& slot(int64_t index) { return lists_.slots[static_cast<size_t>(index)]; }
  int64_t find(int64_t row);
  int64_t free_slot();
  void unlink(int64_t index);
  void drop_pending();
  std::span<std::byte> place(int64_t index) const;

  std::vector<std::unique_ptr<Reader>> readers_;  // by file of the directory; null where it has no part
  std::vector<Part> parts_;
  int64_t rows_of_part_ = 0;
  int64_t row_bytes_;
  int64_t width_;
  DType dtype_;
  std::span<std::byte> memory_;
  ReadPool& pool_;
  Lists lists_;
  ReadBatch demanded_;
  ReadBatch ahead_;
  int64_t pass_ = 0;
  int64_t hand_ = 0;       // the slot that is looked at first when one is needed
  bool has_read_ = false;  // since the files were checked
};

}  // namespace moeflux
