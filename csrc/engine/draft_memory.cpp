#include "engine/draft_memory.h"

#include "core/arena.h"

namespace moeflux {
namespace {

// It sees all rows, so none are kept for the sake of places to go back to.
const Places nowhere = [](int64_t, int64_t) { return false; };

}  // namespace

DraftMemory::DraftMemory(const Variant& variant, const SessionOptions& options, int64_t chunk, int64_t drafts,
                         Backend& backend, RowPools& pools, int64_t beside)
    : width_(variant.hidden_size),
      backend_(backend),
      state_(draft_variant(variant), options, chunk, backend, pools, beside),
      hidden_(backend.allocate((1 + drafts) * width_ * 4, Memory::device, "hidden states")) {}

int64_t DraftMemory::planned_rows(const Variant& variant, const SessionOptions& options, int64_t chunk) {
  return state_layout(draft_variant(variant), options.kv_dtype, nullptr).rows_bytes(options, chunk);
}

int64_t DraftMemory::planned_bytes(const Variant& variant, const SessionOptions& options, int64_t drafts, bool shared) {
  const int64_t hidden = arena_bytes((1 + drafts) * variant.hidden_size * 4);
  return hidden +
         (shared ? 0 : arena_bytes(state_layout(draft_variant(variant), options.kv_dtype, nullptr).exchange_bytes()));
}

void DraftMemory::make_room(int64_t begin, int64_t end) {
  state_.make_room(rows_before(begin), rows_before(end), "rows of the layer that drafts");
}

void DraftMemory::end_call(int64_t position) noexcept { state_.end_call(rows_before(position), nowhere); }

DraftPiece DraftMemory::enter(int64_t begin, int64_t end, bool first) noexcept {
  state_.enter(rows_before(begin), rows_before(end), nowhere);
  DraftPiece piece;
  piece.state = &state_;
  piece.row = begin - first_;
  piece.hidden = {hidden_.get(), 0};
  if (!first || known_) piece.before = piece.hidden.at((first ? row_ : 0) * width_);
  return piece;
}

void DraftMemory::go_to(int64_t position) noexcept {
  known_ = false;
  if (position < first_) begin_anew(position);
}

void DraftMemory::begin_anew(int64_t position) noexcept {
  known_ = false;
  first_ = position + 1;
}

void DraftMemory::become(const DraftMemory& other, int64_t position, bool is_there) {
  first_ = std::min(other.first_, position + 1);
  state_.become(other.state_, rows_before(position), nullptr);
  known_ = is_there && other.known_;
  row_ = 0;
  if (known_) backend_.copy({other.hidden_.get(), other.row_ * width_ * 4}, {hidden_.get(), 0}, width_ * 4).wait();
}

}  // namespace moeflux
