#include "format/store_directory.h"

#include <algorithm>
#include <set>
#include <stdexcept>

#include "core/error.h"
#include "format/tensor_requirements.h"

namespace moeflux {

std::vector<Span> StoreDirectory::expert_spans(int64_t layer, int64_t expert) const {
  if (layer < 0 || layer >= variant.all_layers() || !variant.is_moe(layer))
    throw std::out_of_range(concat("expert_spans: expected a layer with experts, found layer ", layer));
  if (expert < 0 || expert >= variant.experts().count)
    throw std::out_of_range(
        concat("expert_spans: expected an expert from 0 to ", variant.experts().count - 1, ", found ", expert));
  const std::vector<ExpertPlace>& places = expert_places[static_cast<size_t>(layer)];
  std::vector<Span> spans;
  for (size_t i = 0; i < places.size(); ++i) {
    const FilePosition at = places[i].of(expert);
    const int64_t bytes = experts_of(layer).pieces[i].bytes;
    const int64_t row = places[i].row ? places[i].row : bytes;
    for (int64_t done = 0; done < bytes; done += row) spans.push_back({at.file, at.offset + 2 * done, row});
  }
  return spans;
}

std::string StoreDirectory::prefix(int64_t layer) const { return layer_prefix(variant.layers_before + layer); }

std::vector<QuantFormat> StoreDirectory::every_format() const {
  std::vector<QuantFormat> found;
  const auto add = [&](const QuantFormat& format) {
    if (std::ranges::find(found, format) == found.end()) found.push_back(format);
  };
  for (const auto& [name, format] : formats) add(format);
  const auto add_experts = [&](const ExpertLayout& layout) {
    if (layout.pieces.empty()) return;
    for (const QuantFormat& format : {layout.formats.gate, layout.formats.up, layout.formats.down}) add(format);
  };
  add_experts(experts);
  std::ranges::for_each(layouts, add_experts);
  return found;
}

std::vector<int64_t> StoreDirectory::expert_files() const {
  std::set<int64_t> found;
  for (const std::vector<ExpertPlace>& places : expert_places)
    for (const ExpertPlace& place : places)
      for (int64_t expert = 0; expert < (place.each.empty() ? 1 : variant.experts().count); ++expert)
        found.insert(place.of(expert).file);
  return {found.begin(), found.end()};
}

void leave_draft_out(StoreDirectory& store) {
  if (!store.variant.draft) return;
  const auto layers = static_cast<size_t>(store.variant.num_layers());
  const std::string prefix = layer_prefix(store.variant.num_layers());
  const auto belongs = [&](const auto& named) { return named.first.starts_with(prefix); };
  std::erase_if(store.tensors, belongs);
  std::erase_if(store.formats, belongs);
  store.expert_places.resize(layers);
  if (!store.layouts.empty()) store.layouts.resize(layers);
  if (!store.expert_checksums.empty()) store.expert_checksums.resize(layers);
  store.variant.draft.reset();
}

// Of a list with an entry for each layer, or none.
template <typename List>
static void keep_entries(List& list, int64_t first, int64_t end) {
  if (list.empty()) return;
  list.erase(list.begin() + end, list.end());
  list.erase(list.begin(), list.begin() + first);
}

void keep_layers(StoreDirectory& store, int64_t first, int64_t last) {
  Variant& variant = store.variant;
  const int64_t all = variant.num_layers();
  const int64_t end = last == 0 ? all : last;
  if (first < 0 || first >= end || end > all)
    throw ArgumentError(concat("layers: expected a first layer and one past the last, of ", all, " in all, found ",
                               first, " and ", last));
  if (end - first == all) return;
  leave_draft_out(store);
  variant.layers_before += first;
  variant.layers_behind += all - end;
  const bool embeds = variant.begins() || (variant.ends() && variant.tied_embeddings);
  const int64_t kept = variant.layers_before;
  const auto belongs_elsewhere = [&](const auto& named) {
    const std::string& name = named.first;
    if (const int64_t layer = layer_of(name); layer >= 0) return layer < kept || layer >= kept + end - first;
    return name.starts_with("model.embed_tokens") ? !embeds : !variant.ends();
  };
  std::erase_if(store.tensors, belongs_elsewhere);
  std::erase_if(store.formats, belongs_elsewhere);
  keep_entries(variant.layers, first, end);
  keep_entries(store.expert_places, first, end);
  keep_entries(store.layouts, first, end);
  keep_entries(store.expert_checksums, first, end);
  if (!store.layouts.empty() && variant.moe_layers() > 0)
    store.experts = *std::ranges::max_element(store.layouts, {}, &ExpertLayout::bytes);
}

}  // namespace moeflux
