#include "engine/scratch.h"

#include <algorithm>

#include "core/arena.h"
#include "core/error.h"
#include "core/rounding.h"
#include "engine/rope_angles.h"

namespace moeflux {
namespace {

constexpr int64_t view_alignment = 64;
constexpr int64_t max_logit_rows = 32;  // sessions of a step, so that the output matrix is read once for them

size_t index_of(Memory memory) { return static_cast<size_t>(memory); }

}  // namespace

ScratchLayout::Area& ScratchLayout::area(std::string_view name, int64_t elements) {
  auto found = std::ranges::find(areas_, name, &Area::name);
  if (found == areas_.end()) {
    found = areas_.emplace(found);
    found->name = name;
  }
  found->elements = std::max(found->elements, elements);
  return *found;
}

void ScratchLayout::place(View& view, std::string_view name, int64_t elements, Memory memory) {
  Area& own = area(name, elements);
  own.memory = memory;
  own.views.push_back(&view);
}

void ScratchLayout::place(Mirrored& numbers, std::string_view name, int64_t elements) {
  Area& own = area(name, elements);
  own.is_mirrored = true;
  own.mirrors.push_back(&numbers);
}

void ScratchLayout::place_angles(View& view, const Rope& rope, int64_t unit) {
  auto known = std::ranges::find_if(turns_, [&](const Turn& turn) { return turn.rope == rope && turn.unit == unit; });
  if (known == turns_.end()) known = turns_.insert(known, {rope, unit, concat("angles ", turns_.size())});
  place(view, known->area, rows_ * rope.dim);
  area(known->area, 0).is_mirrored = true;
}

std::array<int64_t, 3> ScratchLayout::sizes(bool shared) const {
  std::array<int64_t, 3> sizes = {};
  for (const Area& area : areas_) {
    const int64_t bytes = round_up(area.elements * 4, view_alignment);
    sizes[index_of(shared ? Memory::device : area.memory)] += bytes;
    if (area.is_mirrored && !shared) sizes[index_of(Memory::staging)] += bytes;
  }
  return sizes;
}

int64_t ScratchLayout::bytes(bool shared) const {
  int64_t bytes = 0;
  for (const int64_t size : sizes(shared)) bytes += arena_bytes(size);
  return bytes;
}

int64_t ScratchLayout::device_bytes() const { return arena_bytes(sizes(false)[index_of(Memory::device)]); }

ScratchMemory ScratchLayout::allocate(Backend& backend) {
  const bool shared = backend.shares_memory();
  ScratchMemory memory;
  const std::array<int64_t, 3> sizes = this->sizes(shared);
  for (size_t kind = 0; kind < sizes.size(); ++kind)
    if (sizes[kind]) memory[kind] = backend.allocate(sizes[kind], static_cast<Memory>(kind), "scratch");
  std::array<int64_t, 3> ends = {};
  const auto take = [&](const Area& area, Memory kind) {
    int64_t& end = ends[index_of(kind)];
    const View view = {memory[index_of(kind)].get(), end};
    end += round_up(area.elements * 4, view_alignment);
    return view;
  };
  for (Area& area : areas_) {
    area.at.device = take(area, shared ? Memory::device : area.memory);
    area.at.host = area.is_mirrored && !shared ? take(area, Memory::staging) : area.at.device;
    for (View* view : area.views) *view = area.at.device;
    for (Mirrored* numbers : area.mirrors) *numbers = area.at;
  }
  return memory;
}

std::vector<Angles> ScratchLayout::angles() const {
  std::vector<Angles> all;
  for (const Turn& turn : turns_)
    all.push_back({turn.rope, turn.unit, rope_frequencies(turn.rope), rope_magnitude(turn.rope),
                   std::ranges::find(areas_, turn.area, &Area::name)->at});
  return all;
}

void Scratch::place(ScratchLayout& layout, const Variant& variant) {
  const int64_t width = variant.hidden_size;
  const int64_t streams = variant.stream_count();
  rows = layout.rows();
  logit_rows = std::min(rows, max_logit_rows);
  if (variant.begins()) layout.place(tokens, "tokens", rows * streams, Memory::host_visible);
  layout.place(hidden, "hidden", rows * streams * width);
  if (!variant.is_whole()) layout.place(exchanged, "hidden", rows * streams * width);
  layout.place(normed, "normed", rows * width);
  layout.place(out, "out", rows * width);
  if (variant.ends()) layout.place(logits, "logits", logit_rows * variant.vocab_size);
}

}  // namespace moeflux
