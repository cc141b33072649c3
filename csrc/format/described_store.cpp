#include "format/described_store.h"

#include "core/error.h"
#include "core/text.h"
#include "format/json.h"
#include "format/packed_store.h"
#include "format/variant_json.h"

namespace moeflux {
namespace {

const Json& member(const Json& object, const std::string& key, const std::string& where) {
  const Json* found = object.find(key);
  if (!found) throw FormatError(concat(where, ": field ", in_quotes(key), " is missing"));
  return *found;
}

std::string text_member(const Json& object, const std::string& key, const std::string& where) {
  const Json& value = member(object, key, where);
  if (!value.string()) wrong_value(concat(where, ".", key), "a string", &value);
  return *value.string();
}

int whole_member(const Json& object, const std::string& key, const std::string& where) {
  const Json& value = member(object, key, where);
  if (!value.integer() || *value.integer() < 0 || *value.integer() > 1024)
    wrong_value(concat(where, ".", key), "a whole number up to 1024", &value);
  return static_cast<int>(*value.integer());
}

// {"bits": 4, "group_size": 64, "scale_type": "BF16"}, {"element": "BF16"}, {"element": "MXFP4"} or
// {"element": "Q4_K"}
QuantFormat format_member(const Json& experts, const std::string& key, const std::string& parent) {
  const Json& value = member(experts, key, parent);
  const std::string where = concat(parent, ".", key);
  if (value.find("element")) {
    const std::string element = text_member(value, "element", where);
    if (const auto format = QuantFormat::float_named(element)) return *format;
    if (const BlockType block = block_type_named(element); block != BlockType::none) return QuantFormat::blocks(block);
    return QuantFormat::plain(weight_dtype(element, where));
  }
  const DType scales = weight_dtype(text_member(value, "scale_type", where), where);
  return QuantFormat::affine(whole_member(value, "bits", where), whole_member(value, "group_size", where), scales);
}

}  // namespace

StoreDirectory open_described_store(const std::string& folder) {
  const std::string path = folder + "/moeflux.json";
  const Json root = read_json(path);
  const std::string format = text_member(root, "format", path);
  if (format != "moeflux-packed")
    throw FormatError(concat(path, ": format: expected moeflux-packed, found ", in_quotes(format)));
  const int version = whole_member(root, "version", path);
  if (version < 1 || version > variant_version)
    throw FormatError(concat(path, ": version: expected 1 to ", variant_version, ", found ", version));

  const Variant variant = variant_from_json(member(root, "variant", path), path + ": variant", version);
  const std::string where = path + ": experts";
  const Json& experts = member(root, "experts", path);
  const std::string directory = text_member(experts, "directory", where);
  if (directory.empty() || directory.find('/') != std::string::npos || directory == "..")
    throw FormatError(concat(where, ".directory: expected the name of a folder, found ", in_quotes(directory)));
  const ExpertFormats formats = {format_member(experts, "gate_proj", where), format_member(experts, "up_proj", where),
                                 format_member(experts, "down_proj", where)};
  return open_packed(folder, concat(folder, "/", directory), variant, formats);
}

ExpertChecksums read_expert_checksums(const std::string& folder, const Variant& variant) {
  const std::string path = folder + "/moeflux.json";
  const Json root = read_json(path);
  const std::string where = path + ": expert_sha256";
  const Json& layers = member(root, "expert_sha256", path);
  ExpertChecksums checksums(static_cast<size_t>(variant.all_layers()));
  for (int64_t layer = 0; layer < variant.all_layers(); ++layer) {
    if (!variant.is_moe(layer)) continue;
    const std::string here = concat(where, ".", layer);
    const Json& sums = member(layers, std::to_string(layer), where);
    if (!sums.array() || static_cast<int64_t>(sums.array()->size()) != variant.experts().count)
      wrong_value(here, concat("a list of ", variant.experts().count, ", one for each expert"), &sums);
    for (const Json& sum : *sums.array()) {
      if (!sum.string()) wrong_value(here, "64 hexadecimal digits", &sum);
      checksums[static_cast<size_t>(layer)].push_back(parse_sha256(*sum.string(), here));
    }
  }
  return checksums;
}

}  // namespace moeflux
