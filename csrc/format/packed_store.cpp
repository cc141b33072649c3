#include "format/packed_store.h"

#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "core/file.h"
#include "core/text.h"
#include "format/manifest.h"
#include "format/store_files.h"
#include "format/tensor_match.h"

namespace fs = std::filesystem;

namespace moeflux {
namespace {

constexpr int older_group_size = 64;

// The extractor of the older tools copies the routed experts into the weight file when asked to; the layer files hold
// them too. Biases of experts are dense tensors.
bool is_expert_copy(std::string_view name) {
  return name.find(".mlp.switch_mlp.") != std::string_view::npos && !name.ends_with("_proj.bias");
}

ExpertLayout older_layout(const Variant& v, int bits) {
  const QuantFormat format = QuantFormat::affine(bits, older_group_size);
  return ExpertLayout(v.hidden_size, v.experts().intermediate, {format, format, format});
}

ExpertLayout guess_layout(const Variant& v, const std::string& folder, int64_t layer_bytes) {
  const std::string name = fs::path(folder).filename().string();
  if (name == "packed_experts") return older_layout(v, 4);
  if (name == "packed_experts_2bit") return older_layout(v, 2);
  for (int bits : {4, 2})
    if (ExpertLayout layout = older_layout(v, bits); layout.bytes * v.experts().count == layer_bytes) return layout;
  throw FormatError(concat(printable(folder), ": expected layer files of ",
                           older_layout(v, 4).bytes * v.experts().count, " bytes (4-bit) or ",
                           older_layout(v, 2).bytes * v.experts().count, " (2-bit) for ", printable(v.name), ", found ",
                           layer_bytes));
}

int64_t first_moe_layer(const Variant& v) {
  return std::ranges::find_if(v.layers, [](const Layer& layer) { return layer.experts() != nullptr; }) -
         v.layers.begin();
}

// A layer file for a layer that has no experts means that the store is of another model.
void refuse_other_layer_files(const StoreDirectory& store, const std::string& folder) {
  for (const std::string& name : names_in(folder)) {
    const bool layer_file = name.starts_with("layer_") && name.ends_with(".bin");
    if (!layer_file) continue;
    const std::string path = (fs::path(folder) / name).string();
    if (std::find(store.files.begin(), store.files.end(), path) == store.files.end())
      throw FormatError(concat(printable(path), ": expected only files of the layers with experts of ",
                               printable(store.variant.name), ", found this one"));
  }
}

void add_experts(StoreDirectory& store, const std::string& folder, const std::optional<ExpertFormats>& formats) {
  const Variant& v = store.variant;
  require_folder(folder);
  const auto length_of = [&](int64_t layer) { return File(required_file(folder, layer_file_name(layer))).bytes(); };
  store.experts = formats ? ExpertLayout(v.hidden_size, v.experts().intermediate, *formats)
                          : guess_layout(v, folder, length_of(first_moe_layer(v)));
  store.expert_places.resize(static_cast<size_t>(v.all_layers()));
  const int64_t expected = store.experts.bytes * v.experts().count;
  for (int64_t layer = 0; layer < v.all_layers(); ++layer) {
    if (!v.is_moe(layer)) continue;
    const std::string path = required_file(folder, layer_file_name(layer));
    const int64_t found = length_of(layer);
    if (found != expected)
      throw FormatError(concat(printable(path), ": expected ", expected, " bytes (", v.experts().count, " experts of ",
                               store.experts.bytes, ": ", store.experts.formats.describe(), "), found ", found));
    const auto file = static_cast<int64_t>(store.files.size());
    store.files.push_back(path);
    for (const ExpertPiece& piece : store.experts.pieces)
      store.expert_places[static_cast<size_t>(layer)].push_back({file, piece.offset, store.experts.bytes});
  }
  refuse_other_layer_files(store, folder);
}

}  // namespace

StoreDirectory open_packed(const std::string& weights_dir, const std::string& experts_dir, const Variant& variant,
                           const std::optional<ExpertFormats>& formats) {
  StoreDirectory store;
  store.variant = variant;
  const std::string folder = absolute_path(weights_dir);
  require_folder(folder);
  store.files.push_back(required_file(folder, "model_weights.bin"));
  store.listing = required_file(folder, "model_weights.json");
  const Manifest manifest = parse_manifest(File(store.listing).read_text(json_max_bytes),
                                           File(store.files.front()).bytes(), printable(store.listing));
  TensorTable table;
  for (const ManifestEntry& entry : manifest.tensors) {
    if (is_expert_copy(entry.tensor.name))
      store.ignored.push_back(entry.tensor.name);
    else
      add_stored_tensor(entry.tensor, 0, table, store, entry.block);
  }
  match_tensors(std::move(table), declared_by_manifest(manifest, printable(store.listing)), store);
  add_experts(store, absolute_path(experts_dir), formats);
  return store;
}

std::string layer_file_name(int64_t layer) { return concat("layer_", layer < 10 ? "0" : "", layer, ".bin"); }

}  // namespace moeflux
