#include "engine/ngram_feed.h"

#include <algorithm>
#include <array>

#include "core/arena.h"
#include "core/stopwatch.h"

namespace moeflux {
namespace {

int64_t most_rows(const NgramEmbedding& shape, int64_t chunk) { return chunk * shape.rows_per_token(); }

int64_t kept_bytes(const StoreDirectory& store, int64_t layer, int64_t chunk) {
  return NgramRows::capacity(most_rows(*store.variant.layer(layer).ngram, chunk)) * NgramRows::row_bytes(store, layer);
}

// Those of the positions begin ... end - 1 of a piece's session.
void add_rows(const NgramHash& hash, const Piece& piece, int64_t begin, int64_t end, std::vector<int64_t>& rows) {
  std::array<int32_t, max_ngram_length> tokens;
  for (int64_t at = begin; at < end; ++at) {
    const int64_t count = std::min(hash.length(), at + 1);
    for (int64_t i = 0; i < count; ++i) tokens[static_cast<size_t>(i)] = piece.token(at + 1 - count + i);
    rows.resize(rows.size() + static_cast<size_t>(hash.rows_per_token()));
    hash.rows(tokens.data(), count, rows.data() + rows.size() - hash.rows_per_token());
  }
}

}  // namespace

NgramFeed::NgramFeed(const StoreDirectory& store, int64_t chunk, Backend& backend, ReadPool& pool, ReadMode mode,
                     const ReaderFactory& open)
    : chunk_(chunk) {
  const Variant& v = store.variant;
  for (int64_t layer = 0; layer < v.num_layers(); ++layer) {
    if (!v.layer(layer).ngram) continue;
    const NgramEmbedding& shape = *v.layer(layer).ngram;
    const int64_t most = most_rows(shape, chunk);
    const int64_t bytes = kept_bytes(store, layer, chunk);
    Table table = {
        layer, NgramHash(shape, v.vocab_size), backend.allocate(bytes, Memory::staging, "n-gram rows"), {}, {}, {}};
    const std::span<std::byte> memory(table.memory->host(), static_cast<size_t>(bytes));
    table.rows = std::make_unique<NgramRows>(store, layer, most, memory, pool, mode, open);
    table.wanted.reserve(static_cast<size_t>(most));
    table.next.reserve(static_cast<size_t>(most));
    tables_.push_back(std::move(table));
  }
}

int64_t NgramFeed::planned_rows(const StoreDirectory& store, int64_t chunk) {
  int64_t bytes = 0;
  for (int64_t layer = 0; layer < store.variant.num_layers(); ++layer)
    if (store.variant.layer(layer).ngram) bytes += arena_bytes(kept_bytes(store, layer, chunk));
  return bytes;
}

int64_t NgramFeed::planned_tables(const Variant& variant, int64_t chunk) {
  int64_t bytes = 0;
  for (const Layer& layer : variant.layers) {
    if (!layer.ngram) continue;
    const int64_t most = most_rows(*layer.ngram, chunk);
    bytes += NgramRows::planned_tables(most) + 2 * most * static_cast<int64_t>(sizeof(int64_t));
  }
  return bytes;
}

int64_t NgramFeed::rows() const {
  int64_t bytes = 0;
  for (const Table& table : tables_) bytes += arena_bytes(table.memory->bytes());
  return bytes;
}

int64_t NgramFeed::tables() const {
  int64_t bytes = 0;
  for (const Table& table : tables_)
    bytes += table.rows->tables() +
             static_cast<int64_t>((table.wanted.capacity() + table.next.capacity()) * sizeof(int64_t));
  return bytes;
}

void NgramFeed::begin(std::span<const Piece> pieces, StepStats& stats) {
  pieces_ = pieces;
  for (Table& table : tables_) {
    table.wanted.clear();
    for (const Piece& piece : pieces)
      add_rows(table.hash, piece, piece.position, piece.position + piece.rows(), table.wanted);
    const NgramRows::Asked asked = table.rows->begin(table.wanted);
    stats.ngram_hits += asked.hits;
    stats.ngram_misses += asked.misses;
    stats.bytes_read += asked.misses * table.rows->row_bytes();
  }
}

void NgramFeed::fetch(int64_t layer, float* out, StepStats& stats) {
  Table& table = *std::ranges::find(tables_, layer, &Table::layer);
  const Stopwatch watch;
  table.rows->take(table.wanted, out);
  stats.read_wait_seconds += watch.seconds();
  table.next.clear();
  int64_t left = chunk_;
  for (const Piece& piece : pieces_) {
    const int64_t begin = piece.position + piece.rows();
    const auto known = static_cast<int64_t>(piece.past.size() + piece.given.size());
    const int64_t end = std::min(known, begin + left);
    add_rows(table.hash, piece, begin, end, table.next);
    left -= end - begin;
  }
  if (!table.next.empty()) stats.bytes_read += table.rows->look_ahead(table.next).misses * table.rows->row_bytes();
}

void NgramFeed::finish() {
  for (Table& table : tables_) table.rows->check_unchanged();
  pieces_ = {};
}

void NgramFeed::abandon() noexcept {
  for (Table& table : tables_) table.rows->abandon();
  pieces_ = {};
}

}  // namespace moeflux
