#include "engine/layer_state.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/rounding.h"

namespace moeflux {
namespace {

constexpr int64_t alignment = 64;
constexpr int64_t max_exchange = int64_t{1} << 20;

}  // namespace

StateLayout state_layout(const Variant& variant, DType kv_dtype) {
  StateLayout layout;
  for (int64_t layer = 0; layer < variant.num_layers(); ++layer) {
    LayerState& placed = layout.layers.emplace_back();
    for (StatePiece& piece : variant.state(layer)) {
      const int64_t width = piece.width();
      PlacedPiece& place = placed.emplace_back();
      if (piece.rows) {
        place.rows = {{}, layout.block_bytes, kv_dtype, width, piece.shape.back(), piece.unit};
        layout.block_bytes += round_up(place.rows.block_bytes(), alignment);
      } else {
        place.fixed = {nullptr, layout.recurrent_bytes};
        layout.recurrent_bytes += round_up(width * 4, alignment);
      }
      place.piece = std::move(piece);
    }
  }
  return layout;
}

int64_t StateLayout::exchange_bytes() const { return std::min(block_bytes + recurrent_bytes, max_exchange); }

SessionState::SessionState(const Variant& variant, int64_t max_context, DType kv_dtype, Backend& backend, RowPool& pool)
    : backend_(backend), pool_(pool) {
  StateLayout layout = state_layout(variant, kv_dtype);
  layers_ = std::move(layout.layers);
  recurrent_bytes_ = layout.recurrent_bytes;
  if (layout.block_bytes > 0) {
    table_.resize(static_cast<size_t>(blocks_of(max_context)));
    blocks_.reserve(table_.size());
  }
  recurrent_ = backend.allocate(recurrent_bytes_, Memory::device, "recurrent state");
  if (!backend.shares_memory()) exchange_ = backend.allocate(layout.exchange_bytes(), Memory::staging, "saved state");
  for (LayerState& layer : layers_)
    for (PlacedPiece& each : layer)
      if (each.piece.rows) each.rows.blocks = table_;
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
}

void SessionState::make_room(int64_t begin, int64_t end, const char* asker) {
  if (table_.empty()) return;
  const auto first = static_cast<size_t>(begin / block_rows);
  const auto needed = static_cast<size_t>(blocks_of(end));
  std::vector<size_t> places;  // that need a block of their own
  for (size_t i = first; i < needed; ++i)
    if (i >= blocks_.size() || blocks_[i].is_shared()) places.push_back(i);
  if (places.empty()) return;
  std::vector<RowPool::Block> taken;
  taken.reserve(places.size());
  pool_.take(static_cast<int64_t>(places.size()), static_cast<int64_t>(table_.size()), asker, taken);
  if (places.front() == first && first < blocks_.size() && begin % block_rows > 0)
    backend_.copy(table_[first], taken.front().view(), pool_.block_bytes()).wait();
  for (size_t i = 0; i < places.size(); ++i) {
    table_[places[i]] = taken[i].view();
    if (places[i] < blocks_.size())
      blocks_[places[i]] = std::move(taken[i]);
    else
      blocks_.push_back(std::move(taken[i]));
  }
}

void SessionState::become(const SessionState& other, int64_t position, const Buffer* recurrent) {
  if (recurrent) load_recurrent(*recurrent);
  if (table_.empty()) return;
  const auto full = static_cast<size_t>(position / block_rows);
  for (size_t i = 0; i < full; ++i) {
    blocks_.push_back(other.blocks_[i].share());
    table_[i] = other.table_[i];
  }
  make_room(position, round_up(position, block_rows), "fork");
  if (position % block_rows > 0) backend_.copy(other.table_[full], table_[full], pool_.block_bytes()).wait();
}

void SessionState::keep_rows(int64_t count) noexcept {
  for (const auto kept = static_cast<size_t>(blocks_of(count)); blocks_.size() > kept; blocks_.pop_back())
    table_[blocks_.size() - 1] = {};
}

void SessionState::save_recurrent(const Buffer& to) const {
  backend_.copy({recurrent_.get(), 0}, {&to, 0}, recurrent_bytes_).wait();
}

void SessionState::load_recurrent(const Buffer& from) const {
  backend_.copy({&from, 0}, {recurrent_.get(), 0}, recurrent_bytes_).wait();
}

void SessionState::clear_recurrent() const { backend_.clear({recurrent_.get(), 0}, recurrent_bytes_).wait(); }

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
  const auto place = [this, parts](int64_t begin) -> std::span<std::byte> {
    if (exchange_) return {};
    auto skipped = static_cast<size_t>(begin);
    for (const Part& part : parts) {
      if (skipped < part.bytes)
        return {part.base->at(part.offset + static_cast<int64_t>(skipped), 1).host(), part.bytes - skipped};
      skipped -= part.bytes;
    }
    return {};
  };
  return {std::move(name), static_cast<int64_t>(layer), dtype, std::move(shape), bytes, read_part, write_part, place};
}

// Of so many rows, `in_block` of them in each block, those that begin `offset` bytes behind each block's first and have
// so many bytes each.
void SessionState::add_parts(std::vector<Part>& parts, int64_t rows, int64_t in_block, int64_t offset,
                             int64_t row_bytes) const {
  for (int64_t row = 0; row < rows; row += in_block)
    parts.push_back({&table_[static_cast<size_t>(row / in_block)], offset,
                     static_cast<size_t>(std::min(in_block, rows - row) * row_bytes)});
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
      const int64_t count = position / piece.unit;
      shape.insert(shape.begin(), count);
      std::vector<Part> parts;
      add_parts(parts, count, rows.rows(), rows.offset, rows.row_bytes());
      tensors.push_back(tensor(i, name, rows.dtype, std::move(shape), std::move(parts)));
      if (rows.scales() == 0) continue;
      std::vector<Part> scales;
      for (int64_t head = 0; head < rows.scales(); ++head)
        add_parts(scales, count, rows.rows(), rows.scales_offset() + head * rows.rows() * 2, 2);
      tensors.push_back(tensor(i, name + "_scale", DType::bf16, {rows.scales(), count}, std::move(scales)));
    }
  return tensors;
}

}  // namespace moeflux
