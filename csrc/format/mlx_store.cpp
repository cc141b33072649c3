#include "format/mlx_store.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <set>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "core/text.h"
#include "format/fused_projections.h"
#include "format/json.h"
#include "format/published_experts.h"
#include "format/safetensors.h"
#include "format/store_files.h"
#include "format/tensor_match.h"
#include "format/tensor_requirements.h"

namespace fs = std::filesystem;

namespace moeflux {
namespace {

constexpr std::string_view index_name = "model.safetensors.index.json";
constexpr std::string_view shard_suffix = ".safetensors";

// ---- Shards ---------------------------------------------------------------------------------------------------------

struct Shards {
  std::string index;                                     // its path; empty when there is none
  std::map<std::string, std::set<std::string>> content;  // shard name -> tensors the index lists there
};

// A hostile index could name any file of the machine.
bool is_plain_name(const std::string& name) {
  const bool separators = name.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos;
  return !separators && name.ends_with(shard_suffix) && !name.starts_with('.');
}

Shards shards_of_index(const std::string& path) {
  Shards shards{path, {}};
  const Json index = read_json(path);
  const Json* weights = index.find("weight_map");
  if (!weights || !weights->object())
    wrong_value(concat(printable(shards.index), ": weight_map"), "an object", weights);
  for (const JsonMember& member : *weights->object()) {
    const std::string* name = member.value.string();
    if (!name || !is_plain_name(*name))
      wrong_value(concat(printable(shards.index), ": weight_map: ", in_quotes(member.key)),
                  "the plain name of a .safetensors file in this folder", &member.value);
    shards.content[*name].insert(member.key);
  }
  return shards;
}

Shards find_shards(const std::string& folder) {
  require_folder(folder);
  std::error_code error;
  if (fs::exists(fs::path(folder) / index_name, error))
    return shards_of_index(required_file(folder, std::string(index_name)));
  std::vector<std::string> names;
  std::ranges::copy_if(names_in(folder), std::back_inserter(names), is_plain_name);
  if (std::find(names.begin(), names.end(), "model.safetensors") != names.end()) names = {"model.safetensors"};
  if (names.size() != 1)
    throw FormatError(concat(printable(folder), ": expected ", index_name, " or a single .safetensors file, found ",
                             names.size(), " such files and no index"));
  return {"", {{names.front(), {}}}};
}

void check_index(const Shards& shards, const std::string& shard, const SafetensorsHeader& header) {
  if (shards.index.empty()) return;
  std::set<std::string> listed = shards.content.at(shard);
  for (const TensorEntry& entry : header.tensors)
    if (listed.erase(entry.name) == 0)
      throw FormatError(concat(printable(shards.index), ": expected tensor ", in_quotes(entry.name), " of ",
                               in_quotes(shard), " to be listed there, found it missing"));
  if (!listed.empty())
    throw FormatError(concat(printable(shards.index), ": expected tensor ", in_quotes(*listed.begin()), " in ",
                             in_quotes(shard), ", found none there"));
}

TensorTable read_shards(StoreDirectory& store, const std::string& folder) {
  const Shards shards = find_shards(folder);
  store.listing = shards.index;
  TensorTable table;
  for (const auto& [name, listed] : shards.content) {
    const std::string path = required_file(folder, name);
    const SafetensorsHeader header = read_safetensors_header(path);
    check_index(shards, name, header);
    const auto file = static_cast<int64_t>(store.files.size());
    store.files.push_back(path);
    if (store.listing.empty()) store.listing = path;
    for (const TensorEntry& entry : header.tensors) add_stored_tensor(entry, file, table, store);
  }
  if (table.empty()) throw FormatError(concat(printable(folder), ": expected the tensors of a model, found none"));
  return table;
}

// ---- Routed experts -------------------------------------------------------------------------------------------------

std::string expert_base(int64_t layer, std::string_view projection) {
  return concat(layer_prefix(layer), "mlp.switch_mlp.", projection);
}

// Whether they are as MLX stacks them, and not as Hugging Face publishes them.
bool stacked_by_mlx(TensorTable& table, const StoreDirectory& store, const std::string& folder) {
  for (const auto& [name, tensor] : table)
    if (name.find(".mlp.switch_mlp.") != std::string::npos) return true;
  if (take_as_published(table, store)) return false;
  throw FormatError(
      concat(printable(folder), ": no routed experts found: expected tensors model.layers.N.mlp.switch_mlp.*"));
}

LayerExperts take_stacked_experts(int64_t layer, TensorTable& table, const DeclaredFormats& declared,
                                  const StoreDirectory& store) {
  const Variant& v = store.variant;
  const auto format = [&](std::string_view projection, int64_t rows, int64_t columns) {
    return matrix_format(expert_base(layer, projection), {v.experts().count, rows, columns}, table, declared, store);
  };
  const ExpertFormats formats = {format("gate_proj", v.experts().intermediate, v.hidden_size),
                                 format("up_proj", v.experts().intermediate, v.hidden_size),
                                 format("down_proj", v.hidden_size, v.experts().intermediate)};
  LayerExperts found{formats, {}};
  for (const ExpertPiece& piece : ExpertLayout(v.hidden_size, v.experts().intermediate, formats).pieces) {
    const auto node = table.extract(expert_base(layer, piece.name));
    const Span& whole = node.mapped().spans.front();
    found.places.push_back({whole.file, whole.offset, piece.bytes});
  }
  return found;
}

// Moves the tensors of experts out of `table` into store.expert_places.
void take_experts(TensorTable& table, const DeclaredFormats& declared, StoreDirectory& store) {
  const Variant& v = store.variant;
  store.expert_places.resize(static_cast<size_t>(v.all_layers()));
  int64_t first = -1;  // layer whose formats the others must have
  for (int64_t layer = 0; layer < v.all_layers(); ++layer) {
    if (!v.is_moe(layer)) continue;
    LayerExperts found = store.as_published ? take_published_experts(layer, table, declared, store)
                                            : take_stacked_experts(layer, table, declared, store);
    if (first < 0) {
      store.experts = ExpertLayout(v.hidden_size, v.experts().intermediate, found.formats);
      first = layer;
    }
    if (!(found.formats == store.experts.formats))
      throw FormatError(concat(printable(store.listing), ": experts of layer ", layer,
                               ": expected the formats of layer ", first, ", ", store.experts.formats.describe(),
                               ", found ", found.formats.describe()));
    store.expert_places[static_cast<size_t>(layer)] = std::move(found.places);
  }
}

}  // namespace

StoreDirectory open_mlx(const std::string& folder_path, const Variant& variant) {
  StoreDirectory store;
  store.variant = variant;
  const std::string folder = absolute_path(folder_path);
  TensorTable table = read_shards(store, folder);
  const bool stacked = stacked_by_mlx(table, store, folder);  // first: other messages would be worse
  const std::string config = required_file(folder, "config.json");
  DeclaredFormats declared = declared_by_config(read_json(config), printable(config));
  if (variant.model_type == ModelType::qwen3_next) split_fused_projections(table, declared, store);
  store.as_published = !stacked;
  take_experts(table, declared, store);
  match_tensors(std::move(table), declared, store);
  return store;
}

}  // namespace moeflux
