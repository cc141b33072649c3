// Which rows of n-gram tables the tokens of a pass choose, and how they come to the layers that want them.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "engine/piece.h"
#include "format/store_directory.h"
#include "io/ngram_rows.h"
#include "moeflux.h"

namespace moeflux {

class NgramFeed {
 public:
  // `chunk`: rows of a pass at most. The pool outlives this.
  NgramFeed(const StoreDirectory& store, int64_t chunk, Backend& backend, ReadPool& pool, ReadMode mode,
            const ReaderFactory& open);

  // Bytes of rows that are kept, and of lists: planned, and held.
  static int64_t planned_rows(const StoreDirectory& store, int64_t chunk);
  static int64_t planned_tables(const Variant& variant, int64_t chunk);
  int64_t rows() const;
  int64_t tables() const;
  bool has_tables() const { return !tables_.empty(); }

  // Begins the reads for a pass. The pieces stay until `finish` or `abandon`.
  void begin(std::span<const Piece> pieces, StepStats& stats);
  // Writes the rows of a layer to `out`, [n, width]. Then it begins to read those of the tokens that come next.
  void fetch(int64_t layer, float* out, StepStats& stats);
  // Ends a pass. IoError when rows were read and their files are not what was opened.
  void finish();
  void abandon() noexcept;

 private:
  struct Table {
    int64_t layer;
    NgramHash hash;
    std::unique_ptr<Buffer> memory;
    std::unique_ptr<NgramRows> rows;
    std::vector<int64_t> wanted;  // of the pass: [tokens, rows of a token]
    std::vector<int64_t> next;    // of the pass after it
  };

  int64_t chunk_;
  std::vector<Table> tables_;
  std::span<const Piece> pieces_;
};

}  // namespace moeflux
