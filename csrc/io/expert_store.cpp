#include "io/expert_store.h"

#include <algorithm>
#include <cassert>
#include <stdexcept>

#include "core/error.h"
#include "core/rounding.h"
#include "core/text.h"

namespace moeflux {
namespace {

// One read can bring an expert if its pieces lie in one file, one after the other, as in ExpertLayout, and if kernels
// can use them in a slot in these places.
bool lies_contiguous(const StoreDirectory& store) {
  if (!store.layouts.empty()) return false;
  for (const ExpertPiece& piece : store.experts.pieces)
    if (piece.offset % piece_alignment != 0) return false;
  for (const std::vector<ExpertPlace>& places : store.expert_places)
    for (size_t i = 0; i < places.size(); ++i) {
      const int64_t offset = places.front().offset + store.experts.pieces[i].offset;
      if (!places[i].each.empty() || places[i].row || places[i].file != places.front().file ||
          places[i].stride != places.front().stride || places[i].offset != offset)
        return false;
    }
  return true;
}

// Of a piece, in the layer where it is largest.
int64_t largest_piece(const StoreDirectory& store, size_t piece) {
  int64_t bytes = store.experts.pieces[piece].bytes;
  for (const ExpertLayout& layout : store.layouts)
    if (!layout.pieces.empty()) bytes = std::max(bytes, layout.pieces[piece].bytes);
  return bytes;
}

}  // namespace

SlotLayout slot_layout(const StoreDirectory& store) {
  const bool contiguous = lies_contiguous(store);
  SlotLayout slot;
  for (size_t i = 0; i < store.experts.pieces.size(); ++i) {
    slot.offsets.push_back(contiguous ? store.experts.pieces[i].offset : round_up(slot.bytes, piece_alignment));
    slot.bytes = slot.offsets.back() + largest_piece(store, i);
  }
  slot.bytes = round_up(slot.bytes, direct_alignment);
  return slot;
}

static bool has_turns(const StoreDirectory& store) {
  return std::ranges::any_of(store.expert_places, [](const std::vector<ExpertPlace>& places) {
    return std::ranges::any_of(places, [](const ExpertPlace& place) { return place.row > 0; });
  });
}

int64_t bounce_of(const StoreDirectory& store, ReadMode mode) {
  const bool turns = has_turns(store);
  if (mode == ReadMode::buffered) return turns ? turns_bytes : 0;
  if (turns) return turns_bytes + bounce_bytes + direct_alignment;
  if (has_tables(store.variant)) return bounce_bytes;  // a row begins anywhere
  const bool contiguous = lies_contiguous(store);
  const SlotLayout slot = slot_layout(store);
  for (int64_t layer = 0; layer < static_cast<int64_t>(store.expert_places.size()); ++layer) {
    const std::vector<ExpertPlace>& places = store.expert_places[static_cast<size_t>(layer)];
    for (size_t i = 0; i < (contiguous ? std::min<size_t>(1, places.size()) : places.size()); ++i) {
      const int64_t bytes = contiguous ? store.experts.bytes : store.experts_of(layer).pieces[i].bytes;
      int64_t all = places[i].offset | places[i].stride | slot.offsets[i] | bytes;
      for (const FilePosition& at : places[i].each) all |= at.offset;
      if (all % direct_alignment != 0) return bounce_bytes;
    }
  }
  return 0;
}

ExpertStore::ExpertStore(const StoreDirectory& store, const ExpertStoreOptions& options)
    : layout_(store.experts),
      layouts_(store.layouts),
      experts_per_layer_(store.variant.experts().count),
      layers_before_(store.variant.layers_before),
      contiguous_(lies_contiguous(store)),
      mode_(options.mode) {
  slot_ = slot_layout(store);
  open_files(store, options);
  for (int64_t layer = 0; layer < static_cast<int64_t>(store.expert_places.size()); ++layer)
    places_.push_back(places_of(store, layer));
  check_lengths();
  bounce_ = bounce_of(store, options.mode);
}

void ExpertStore::open_files(const StoreDirectory& store, const ExpertStoreOptions& options) {
  readers_.resize(store.files.size());
  for (const std::vector<ExpertPlace>& places : store.expert_places)
    for (const ExpertPlace& place : places)
      for (int64_t expert = 0; expert < (place.each.empty() ? 1 : experts_per_layer_); ++expert) {
        const auto file = static_cast<size_t>(place.of(expert).file);
        if (!readers_[file]) readers_[file] = options.open(store.files[file], options.mode);
      }
}

std::vector<ExpertStore::Place> ExpertStore::places_of(const StoreDirectory& store, int64_t layer) const {
  const std::vector<ExpertPlace>& stored = store.expert_places[static_cast<size_t>(layer)];
  std::vector<Place> places;
  for (size_t i = 0; i < stored.size(); ++i) {
    const int64_t bytes = contiguous_ ? layout_.bytes : experts(layer).pieces[i].bytes;
    const auto first = std::ranges::find_if(places, [&](const Place& place) {
      const ExpertPlace& other = place.stored;
      return other.row && other.file == stored[i].file && other.offset + other.row == stored[i].offset;
    });
    if (stored[i].row && first != places.end())
      first->apart = slot_.offsets[i] - first->landing;
    else
      places.push_back({stored[i], slot_.offsets[i], stored[i].row ? 2 * bytes : bytes});
    if (contiguous_) break;
  }
  return places;
}

void ExpertStore::check_lengths() const {
  for (const std::vector<Place>& places : places_)
    for (const Place& place : places)
      for (int64_t expert = 0; expert < experts_per_layer_; ++expert) {
        const FilePosition at = place.stored.of(expert);
        const Reader& reader = *readers_[static_cast<size_t>(at.file)];
        if (reader.bytes() < at.offset + place.bytes)
          throw IoError(concat(printable(reader.path()), ": expected at least ", at.offset + place.bytes,
                               " bytes, found ", reader.bytes(), ": it changed since the store was opened"));
      }
}

bool ExpertStore::has_experts(int64_t layer) const {
  return layer >= 0 && layer < layers() && !places_[static_cast<size_t>(layer)].empty();
}

const std::string& ExpertStore::path(int64_t layer) const {
  const FilePosition at = places_.at(static_cast<size_t>(layer)).at(0).stored.of(0);
  return readers_[static_cast<size_t>(at.file)]->path();
}

int64_t ExpertStore::add_reads(int64_t layer, int64_t expert, const Landing& slot, ReadBatch& batch,
                               int64_t parts) const {
  if (!has_experts(layer))
    throw std::out_of_range(concat("[ExpertStore] expected a layer with experts, found layer ", layer));
  if (expert < 0 || expert >= experts_per_layer_)
    throw std::out_of_range(
        concat("[ExpertStore] expected an expert from 0 to ", experts_per_layer_ - 1, ", found ", expert));
  assert(slot.bytes() >= slot_.bytes && parts > 0);
  const int64_t bytes = experts(layer).bytes;
  const int64_t part = round_up((bytes + parts - 1) / parts, direct_alignment);
  for (const Place& place : places_[static_cast<size_t>(layer)]) {
    const FilePosition at = place.stored.of(expert);
    Reader* reader = readers_[static_cast<size_t>(at.file)].get();
    const int64_t row = place.stored.row;
    const int64_t each = row ? round_up(part, 2 * row) : part;
    for (int64_t done = 0; done < place.bytes; done += each) {
      const int64_t count = std::min(each, place.bytes - done);
      const Landing into =
          row ? slot.part(place.landing + done / 2, count / 2) : slot.part(place.landing + done, count);
      batch.add({reader, at.offset + done, into, row, place.apart});
    }
  }
  return bytes;
}

void ExpertStore::check_unchanged() const {
  for (const std::unique_ptr<Reader>& reader : readers_)
    if (reader) reader->check_unchanged();
}

ReadCounts ExpertStore::counts() const {
  ReadCounts sum;
  for (const std::unique_ptr<Reader>& reader : readers_) {
    if (!reader) continue;
    const ReadCounts counts = reader->counts();
    sum.calls += counts.calls;
    sum.bytes += counts.bytes;
  }
  return sum;
}

}  // namespace moeflux
