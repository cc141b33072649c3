#include "engine/scratch.h"

#include <algorithm>

#include "core/error.h"
#include "core/rounding.h"
#include "engine/rope_angles.h"

namespace moeflux {
namespace {

constexpr int64_t view_alignment = 64;
constexpr int64_t most_logit_rows = 16;

}  // namespace

void ScratchLayout::place(View& view, std::string_view name, int64_t elements) {
  auto area = std::ranges::find(areas_, name, &Area::name);
  if (area == areas_.end()) area = areas_.insert(area, {std::string(name), 0, {}});
  area->elements = std::max(area->elements, elements);
  area->views.push_back(&view);
}

void ScratchLayout::place_angles(View& view, const Rope& rope) {
  auto known = std::ranges::find(ropes_, rope, &std::pair<Rope, std::string>::first);
  if (known == ropes_.end()) known = ropes_.insert(known, {rope, concat("angles ", ropes_.size())});
  place(view, known->second, rows_ * rope.dim);
}

int64_t ScratchLayout::bytes() const {
  int64_t bytes = 0;
  for (const Area& area : areas_) bytes += round_up(area.elements * 4, view_alignment);
  return bytes;
}

std::unique_ptr<Buffer> ScratchLayout::allocate(Backend& backend) const {
  std::unique_ptr<Buffer> arena = backend.allocate(bytes(), "scratch");
  int64_t offset = 0;
  for (const Area& area : areas_) {
    for (View* view : area.views) *view = {arena.get(), offset};
    offset += round_up(area.elements * 4, view_alignment);
  }
  return arena;
}

std::vector<Angles> ScratchLayout::angles() const {
  std::vector<Angles> all;
  for (const auto& [rope, name] : ropes_)
    all.push_back({rope, rope_frequencies(rope), rope_magnitude(rope),
                   *std::ranges::find(areas_, name, &Area::name)->views.front()});
  return all;
}

void Scratch::place(ScratchLayout& layout, int64_t hidden_size, int64_t vocab_size) {
  rows = layout.rows();
  logit_rows = std::min(rows, most_logit_rows);
  layout.place(tokens, "tokens", rows);
  layout.place(hidden, "hidden", rows * hidden_size);
  layout.place(normed, "normed", rows * hidden_size);
  layout.place(out, "out", rows * hidden_size);
  layout.place(logits, "logits", logit_rows * vocab_size);
}

}  // namespace moeflux
