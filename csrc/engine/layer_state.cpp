#include "engine/layer_state.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <utility>

#include "core/rounding.h"

namespace moeflux {
namespace {

constexpr int64_t alignment = 64;
constexpr int64_t max_exchange = int64_t{1} << 20;

std::atomic<int64_t> sessions_made = 0;

}  // namespace

StateLayout state_layout(const Variant& variant, DType kv_dtype, DeltaRoom room) {
  StateLayout layout;
  for (int64_t layer = 0; layer < variant.num_layers(); ++layer) {
    LayerState& placed = layout.layers.emplace_back();
    for (StatePiece& piece : variant.state(layer)) {
      const int64_t width = piece.width();
      PlacedPiece& place = placed.emplace_back();
      if (piece.rows) {
        auto kind = std::ranges::find(layout.kinds, piece.window, &RowKind::window);
        if (kind == layout.kinds.end()) kind = layout.kinds.insert(kind, {piece.window, 0});
        place.kind = static_cast<size_t>(kind - layout.kinds.begin());
        place.rows = {{}, kind->block_bytes, kv_dtype, width, piece.shape.back(), piece.unit};
        kind->block_bytes += round_up(place.rows.block_bytes(), alignment);
      } else {
        place.fixed = {nullptr, layout.recurrent_bytes};
        place.bytes = width * 4;
        if (piece.is_delta && room) place.bytes += room(piece.shape[0], piece.shape[1], piece.shape[2]);
        layout.recurrent_bytes += round_up(place.bytes, alignment);
      }
      place.piece = std::move(piece);
    }
  }
  return layout;
}

int64_t StateLayout::rows_bytes(const SessionOptions& session, int64_t chunk) const {
  int64_t bytes = 0;
  for (const RowKind& kind : kinds)
    bytes += RowPool::planned_bytes(kind.planned_blocks(session.max_context, chunk, session.max_checkpoints),
                                    kind.block_bytes);
  return bytes;
}

int64_t StateLayout::exchange_bytes() const {
  int64_t bytes = recurrent_bytes;
  for (const RowKind& kind : kinds) bytes += kind.block_bytes;
  return std::min(bytes, max_exchange);
}

SessionState::SessionState(const Variant& variant, const SessionOptions& options, int64_t chunk, Backend& backend,
                           RowPools& pools, int64_t beside)
    : backend_(backend), pools_(pools), layers_before_(variant.layers_before), number_(++sessions_made) {
  StateLayout layout = state_layout(variant, options.kv_dtype, backend.delta_room());
  layers_ = std::move(layout.layers);
  recurrent_bytes_ = layout.recurrent_bytes;
  tables_.reserve(layout.kinds.size());
  for (size_t i = 0; i < layout.kinds.size(); ++i) {
    const RowKind& kind = layout.kinds[i];
    tables_.emplace_back(kind, pools[i], options.max_context, chunk);
    planned_.push_back({kind.planned_blocks(options.max_context, chunk, options.max_checkpoints),
                        layout.rows_bytes(options, chunk) + beside});
  }
  recurrent_ = backend.allocate(recurrent_bytes_, Memory::device, "recurrent state");
  if (!backend.shares_memory()) exchange_ = backend.allocate(layout.exchange_bytes(), Memory::staging, "saved state");
  for (LayerState& layer : layers_)
    for (PlacedPiece& each : layer)
      if (each.piece.rows) each.rows.blocks = tables_[each.kind].views();
  place_recurrent();
}

void SessionState::place_recurrent() noexcept {
  for (LayerState& layer : layers_)
    for (PlacedPiece& each : layer)
      if (!each.piece.rows) each.fixed.buffer = recurrent_.get();
}

void SessionState::swap_recurrent(std::unique_ptr<Buffer>& copy) noexcept {
  recurrent_.swap(copy);
  place_recurrent();
  ++swaps_;
}

Placing SessionState::placing() const noexcept {
  Placing placing = {number_, swaps_};
  for (const RowTable& table : tables_) placing.changes += table.changes();
  return placing;
}

bool SessionState::has_room(int64_t row) const {
  return std::ranges::all_of(tables_, [&](const RowTable& table) { return table.has_room(row); });
}

// Has each table take what it lacks, and `use` it. What fails gives all of it back.
template <typename Lacking, typename Use>
void SessionState::take(const char* asker, const Lacking& lacking, const Use& use) {
  int64_t bytes = 0;
  for (const RowTable& table : tables_) bytes += RowPool::planned_bytes(lacking(table), table.kind().block_bytes);
  if (bytes > 0) pools_.front().check(bytes, asker);
  size_t taken = 0;
  try {
    while (taken < tables_.size()) {
      RowTable& table = tables_[taken];
      table.take(lacking(table), planned_[taken++], asker);
    }
    for (RowTable& table : tables_) use(table);
  } catch (...) {
    while (taken > 0) tables_[--taken].undo_take();
    throw;
  }
}

void SessionState::make_room(int64_t begin, int64_t end, const char* asker) {
  take(
      asker, [&](const RowTable& table) { return table.lacking(begin, end); },
      [&](RowTable& table) { table.own(backend_, begin, end); });
}

void SessionState::enter(int64_t begin, int64_t end, const Places& places) noexcept {
  for (RowTable& table : tables_) table.enter(begin, end, places);
}

void SessionState::forget_rows(int64_t position, const Places& places) noexcept {
  for (RowTable& table : tables_) table.forget(position, places);
}

void SessionState::end_call(int64_t position, const Places& places) noexcept {
  for (RowTable& table : tables_) table.end_call(position, places);
}

int64_t SessionState::exact_from(int64_t position) const {
  int64_t first = has_recurrent() ? position : 0;
  for (const RowTable& table : tables_) first = std::max(first, table.exact_from(position));
  return first;
}

void SessionState::become(const SessionState& other, int64_t position, const Buffer* recurrent) {
  if (recurrent) load_recurrent(*recurrent);
  const auto source = [&](const RowTable& table) -> const RowTable& {
    return other.tables_[static_cast<size_t>(&table - tables_.data())];
  };
  take(
      "fork", [&](const RowTable& table) { return int64_t{source(table).has_part(position)}; },
      [&](RowTable& table) { table.become(backend_, source(table), position); });
}

void SessionState::renew(int64_t position, const char* asker) {
  take(asker, [&](const RowTable& table) { return table.lacking_anew(position); }, [](RowTable&) {});
  for (RowTable& table : tables_) table.renew(position);
}

void SessionState::save_recurrent(const Buffer& to) const {
  backend_.copy({recurrent_.get(), 0}, {&to, 0}, recurrent_bytes_).wait();
}

void SessionState::load_recurrent(const Buffer& from) const {
  backend_.copy({&from, 0}, {recurrent_.get(), 0}, recurrent_bytes_).wait();
}

void SessionState::clear_recurrent() const { backend_.clear({recurrent_.get(), 0}, recurrent_bytes_).wait(); }

void SessionState::complete_recurrent() const {
  for (const LayerState& layer : layers_)
    for (const PlacedPiece& each : layer)
      if (each.has_room()) backend_.complete(each.fixed, each.piece.shape[0]).wait();
}

void SessionState::forget_pending() const {
  for (const LayerState& layer : layers_)
    for (const PlacedPiece& each : layer)
      if (each.has_room())
        backend_.clear(each.fixed.at(each.piece.width()), each.bytes - each.piece.width() * 4).wait();
}

void SessionState::read(View from, std::span<std::byte> to) const {
  if (to.empty()) return;
  if (!exchange_) {
    std::memcpy(to.data(), from.host(), to.size());
    return;
  }
  const std::lock_guard lock(exchanging_);
  const auto room = static_cast<size_t>(exchange_->bytes());
  for (size_t done = 0; done < to.size(); done += room) {
    const std::span<std::byte> part = to.subspan(done, std::min(room, to.size() - done));
    backend_.copy(from.at(static_cast<int64_t>(done), 1), {exchange_.get(), 0}, static_cast<int64_t>(part.size()))
        .wait();
    std::memcpy(part.data(), exchange_->host(), part.size());
  }
}

void SessionState::write(std::span<const std::byte> from, View to) const {
  if (from.empty()) return;
  if (!exchange_) {
    std::memcpy(to.host(), from.data(), from.size());
    return;
  }
  const std::lock_guard lock(exchanging_);
  const auto room = static_cast<size_t>(exchange_->bytes());
  for (size_t done = 0; done < from.size(); done += room) {
    const std::span<const std::byte> part = from.subspan(done, std::min(room, from.size() - done));
    std::memcpy(exchange_->host(), part.data(), part.size());
    backend_.copy({exchange_.get(), 0}, to.at(static_cast<int64_t>(done), 1), static_cast<int64_t>(part.size())).wait();
  }
}

// `size` bytes of a tensor from `begin` on: visit(a place of theirs, where they are among these bytes, how many).
template <typename Visit>
void SessionState::each_part(const std::vector<Part>& parts, int64_t begin, size_t size, const Visit& visit) {
  auto skipped = static_cast<size_t>(begin);
  size_t done = 0;
  for (const Part& part : parts) {
    if (done == size) return;
    const size_t before = std::min(skipped, part.bytes);
    const size_t count = std::min(part.bytes - before, size - done);
    skipped -= before;
    if (count > 0) visit(part.base->at(part.offset + static_cast<int64_t>(before), 1), done, count);
    done += count;
  }
}

// A tensor and its places, in its own order.
StateTensor SessionState::tensor(size_t layer, std::string name, DType dtype, std::vector<int64_t> shape,
                                 std::vector<Part> parts) const {
  int64_t bytes = 0;
  for (const Part& part : parts) bytes += static_cast<int64_t>(part.bytes);
  const auto read_part = [this, parts](int64_t begin, std::span<std::byte> to) {
    each_part(parts, begin, to.size(), [&](View part, size_t at, size_t size) { read(part, to.subspan(at, size)); });
  };
  const auto write_part = [this, parts](int64_t begin, std::span<const std::byte> from) {
    each_part(parts, begin, from.size(),
              [&](View part, size_t at, size_t size) { write(from.subspan(at, size), part); });
  };
  const int64_t number = layers_before_ + static_cast<int64_t>(layer);
  return {std::move(name), number, dtype, std::move(shape), bytes, read_part, write_part};
}

// Of rows first ... end - 1, `in_block` of them in each block: those that begin `offset` bytes behind each block's
// first and have so many bytes each.
std::vector<SessionState::Part> SessionState::row_parts(std::span<const View> blocks, int64_t first, int64_t end,
                                                        int64_t in_block, int64_t offset, int64_t row_bytes) {
  std::vector<Part> parts;
  for (int64_t row = first, next = 0; row < end; row = next) {
    next = std::min(end, round_up(row + 1, in_block));
    parts.push_back({&blocks[static_cast<size_t>(row / in_block)], offset + row % in_block * row_bytes,
                     static_cast<size_t>((next - row) * row_bytes)});
  }
  return parts;
}

std::vector<StateTensor> SessionState::tensors(int64_t position) const {
  std::vector<StateTensor> tensors;
  for (size_t i = 0; i < layers_.size(); ++i)
    for (const PlacedPiece& placed : layers_[i]) {
      const StatePiece& piece = placed.piece;
      const std::string name(piece.name);
      std::vector<int64_t> shape = piece.shape;
      if (!piece.rows) {
        const auto bytes = static_cast<size_t>(piece.width() * 4);
        tensors.push_back(tensor(i, name, DType::f32, std::move(shape), {{&placed.fixed, 0, bytes}}));
        continue;
      }
      const Cache& rows = placed.rows;
      const int64_t first = tables_[placed.kind].kind().first_needed(position) / piece.unit;
      const int64_t end = position / piece.unit;
      shape.insert(shape.begin(), end - first);
      const auto parts = [&](int64_t offset, int64_t row_bytes) {
        return row_parts(rows.blocks, first, end, rows.rows(), offset, row_bytes);
      };
      tensors.push_back(tensor(i, name, rows.dtype, std::move(shape), parts(rows.offset, rows.row_bytes())));
      if (rows.scales() == 0) continue;
      std::vector<Part> scales;
      for (int64_t head = 0; head < rows.scales(); ++head)
        std::ranges::copy(parts(rows.scales_offset() + head * rows.rows() * 2, 2), std::back_inserter(scales));
      tensors.push_back(tensor(i, name + "_scale", DType::bf16, {rows.scales(), end - first}, std::move(scales)));
    }
  return tensors;
}

}  // namespace moeflux
