#include "io/ngram_rows.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <exception>
#include <utility>

#include "core/error.h"
#include "core/half.h"
#include "core/text.h"

namespace moeflux {
namespace {

const NgramEmbedding& shape_of(const StoreDirectory& store, int64_t layer) { return *store.variant.layer(layer).ngram; }

const StoredTensor& part_of(const StoreDirectory& store, int64_t layer, int64_t part) {
  return store.tensors.at(store.prefix(layer) + shape_of(store, layer).part_name(part));
}

void widen(DType dtype, const std::byte* from, int64_t count, float* out) {
  if (dtype == DType::f32) {
    std::memcpy(out, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    uint16_t half;
    std::memcpy(&half, from + 2 * i, sizeof half);
    out[i] = dtype == DType::bf16 ? bf16_to_f32(half) : f16_to_f32(half);
  }
}

}  // namespace

int64_t NgramRows::row_bytes(const StoreDirectory& store, int64_t layer) {
  return shape_of(store, layer).row_width() * static_cast<int64_t>(dtype_bytes(part_of(store, layer, 0).dtype));
}

int64_t NgramRows::planned_tables(int64_t most) {
  return planned_bytes<Lists>(most) + 2 * most * static_cast<int64_t>(sizeof(ReadRequest));
}

int64_t NgramRows::tables() const {
  return held_bytes(lists_, int64_t{0}) +
         static_cast<int64_t>((demanded_.capacity() + ahead_.capacity()) * sizeof(ReadRequest));
}

NgramRows::NgramRows(const StoreDirectory& store, int64_t layer, int64_t most, std::span<std::byte> memory,
                     ReadPool& pool, ReadMode mode, const ReaderFactory& open)
    : readers_(store.files.size()),
      row_bytes_(row_bytes(store, layer)),
      width_(shape_of(store, layer).row_width()),
      dtype_(part_of(store, layer, 0).dtype),
      memory_(memory),
      pool_(pool) {
  const NgramEmbedding& shape = shape_of(store, layer);
  rows_of_part_ = shape.table_rows() / shape.parts;
  for (int64_t part = 0; part < shape.parts; ++part) {
    const StoredTensor& tensor = part_of(store, layer, part);
    const Span& span = tensor.spans.front();
    const std::string& path = store.files[static_cast<size_t>(span.file)];
    if (tensor.dtype != dtype_)
      throw FormatError(concat(printable(path), ": ", shape.part_name(part), ": expected ", dtype_name(dtype_),
                               " as the parts before, found ", dtype_name(tensor.dtype)));
    std::unique_ptr<Reader>& reader = readers_[static_cast<size_t>(span.file)];
    if (!reader) reader = open(path, mode);
    if (reader->bytes() < span.offset + span.bytes)
      throw IoError(concat(printable(path), ": expected at least ", span.offset + span.bytes, " bytes, found ",
                           reader->bytes(), ": it changed since the store was opened"));
    parts_.push_back({reader.get(), span.offset});
  }
  make_lists(lists_, most);
  std::ranges::fill(lists_.buckets, -1);
  lists_.pending.clear();
  demanded_.reserve(static_cast<size_t>(most));
  ahead_.reserve(static_cast<size_t>(most));
}

std::span<std::byte> NgramRows::place(int64_t index) const {
  return memory_.subspan(static_cast<size_t>(index * row_bytes_), static_cast<size_t>(row_bytes_));
}

int64_t NgramRows::find(int64_t row) {
  int64_t index = bucket(row);
  while (index >= 0 && slot(index).row != row) index = slot(index).next;
  return index;
}

void NgramRows::unlink(int64_t index) {
  int64_t* link = &bucket(slot(index).row);
  while (*link != index) link = &slot(*link).next;
  *link = slot(index).next;
  slot(index) = {};
}

// One that neither this pass nor a read needs. Those used since the hand last passed get another round.
int64_t NgramRows::free_slot() {
  const auto count = static_cast<int64_t>(lists_.slots.size());
  for (int64_t looked = 0; looked < 2 * count; ++looked, hand_ = (hand_ + 1) % count) {
    Slot& each = slot(hand_);
    if (each.row < 0) return hand_;
    if (each.pass == pass_ || !each.is_ready || std::exchange(each.was_used, false)) continue;
    unlink(hand_);
    return hand_;
  }
  throw StateError("n-gram rows: expected a place for a row, found none: more were asked for than a pass has");
}

NgramRows::Asked NgramRows::ask(std::span<const int64_t> rows, ReadBatch& batch) {
  Asked asked;
  for (const int64_t row : rows) {
    int64_t index = find(row);
    if (index >= 0) {
      ++asked.hits;
    } else {
      index = free_slot();
      slot(index) = {row, bucket(row), 0, false, false};
      bucket(row) = index;
      lists_.pending.push_back(index);
      const Part& part = parts_[static_cast<size_t>(row / rows_of_part_)];
      batch.add({part.reader, part.offset + row % rows_of_part_ * row_bytes_, place(index)});
      ++asked.misses;
    }
    slot(index).pass = pass_;
    slot(index).was_used = true;
  }
  has_read_ = has_read_ || asked.misses > 0;
  return asked;
}

NgramRows::Asked NgramRows::begin(std::span<const int64_t> rows) {
  ++pass_;
  ahead_.promote();
  const Asked asked = ask(rows, demanded_);
  pool_.submit(demanded_);
  return asked;
}

NgramRows::Asked NgramRows::look_ahead(std::span<const int64_t> rows) {
  const Asked asked = ask(rows, ahead_);
  pool_.submit(ahead_, ReadPriority::look_ahead);
  return asked;
}

void NgramRows::take(std::span<const int64_t> rows, float* out) {
  std::exception_ptr failure;
  for (ReadBatch* batch : {&demanded_, &ahead_}) {
    try {
      if (!batch->wait()) throw StateError("n-gram rows: expected all reads to end, found some given up");
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) {
    drop_pending();
    std::rethrow_exception(failure);
  }
  for (const int64_t index : lists_.pending) slot(index).is_ready = true;
  lists_.pending.clear();
  for (const int64_t row : rows) {
    const int64_t index = find(row);
    assert(index >= 0 && slot(index).is_ready);
    widen(dtype_, place(index).data(), width_, out);
    out += width_;
  }
}

void NgramRows::drop_pending() {
  for (const int64_t index : lists_.pending) unlink(index);
  lists_.pending.clear();
}

void NgramRows::abandon() noexcept {
  for (ReadBatch* batch : {&demanded_, &ahead_}) {
    try {
      batch->cancel();
      static_cast<void>(batch->wait());
    } catch (...) {  // whoever gives up has an error of its own
    }
  }
  drop_pending();
}

void NgramRows::check_unchanged() {
  if (!std::exchange(has_read_, !lists_.pending.empty())) return;
  try {
    for (const std::unique_ptr<Reader>& reader : readers_)
      if (reader) reader->check_unchanged();
  } catch (...) {
    abandon();
    for (int64_t index = 0; index < static_cast<int64_t>(lists_.slots.size()); ++index)
      if (slot(index).row >= 0) unlink(index);
    throw;
  }
}

}  // namespace moeflux
