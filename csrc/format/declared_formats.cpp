#include "format/declared_formats.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "core/text.h"
#include "format/tensor_requirements.h"

namespace moeflux {
namespace {

constexpr std::string_view weight_suffix = ".weight";
constexpr std::array<std::string_view, 4> modes = {"affine", "mxfp4", "mxfp8", "nvfp4"};

// What MLX calls it; nothing where it has none such.
std::string_view mode_of(const QuantFormat& format) {
  if (format.is_affine()) return "affine";
  if (format.is_mxfp4()) return "mxfp4";
  if (format == QuantFormat::mxfp8()) return "mxfp8";
  return format == QuantFormat::nvfp4(false) ? "nvfp4" : "";
}

int64_t positive_or_unsaid(const Json& fields, std::string_view key, std::string_view where) {
  const Json* field = fields.find(key);
  if (!field) return 0;
  if (!field->integer() || *field->integer() < 1)
    wrong_value(concat(where, ": ", key), "a positive whole number", field);
  return *field->integer();
}

std::string canonical_module(const std::string& stored) {
  const std::string name = canonical_name(concat(stored, weight_suffix));
  return name.substr(0, name.size() - weight_suffix.size());
}

DeclaredFormat format_of(const Json& fields, std::string_view where) {
  const Json* mode = fields.find("mode");
  const std::string name = !mode ? "affine" : mode->string() ? *mode->string() : "";
  if (std::ranges::find(modes, name) == modes.end())
    wrong_value(concat(where, ": mode"), R"("affine", "mxfp4", "mxfp8" or "nvfp4")", mode);
  return {true, positive_or_unsaid(fields, "bits", where), positive_or_unsaid(fields, "group_size", where), name};
}

}  // namespace

void DeclaredFormats::check(const std::string& base, const QuantFormat& found, std::string_view tensor) const {
  const auto module = modules.find(base);
  if (module == modules.end() && !found.is_quantised()) return;
  if (module == modules.end() && !others)
    throw FormatError(concat(tensor, ": found ", found.describe(), ", but ", where, " declares no quantisation"));
  const DeclaredFormat& declared = module == modules.end() ? *others : module->second;
  if (declared.quantized != found.is_quantised())
    throw FormatError(concat(tensor, ": expected ", declared.quantized ? "a quantised" : "an unquantised",
                             " matrix as declared in ", where, ", found ", found.describe()));
  if (!declared.mode.empty() && declared.mode != mode_of(found))
    throw FormatError(
        concat(tensor, ": expected the mode ", declared.mode, " as declared in ", where, ", found ", found.describe()));
  if (declared.bits && declared.bits != found.bits)
    throw FormatError(
        concat(tensor, ": expected ", declared.bits, " bits as declared in ", where, ", found ", found.describe()));
  if (declared.group_size && declared.group_size != found.group_size)
    throw FormatError(concat(tensor, ": expected groups of ", declared.group_size, " as declared in ", where,
                             ", found ", found.describe()));
}

DeclaredFormats declared_by_manifest(const Manifest& manifest, std::string where) {
  DeclaredFormats declared;
  declared.where = std::move(where);
  for (const ManifestEntry& entry : manifest.tensors) {
    const std::string name = canonical_name(entry.tensor.name);
    if (entry.bits && name.ends_with(weight_suffix))
      declared.modules[name.substr(0, name.size() - weight_suffix.size())] = {true, entry.bits, 0, ""};
  }
  return declared;
}

DeclaredFormats declared_by_config(const Json& config, std::string where) {
  DeclaredFormats declared;
  declared.where = std::move(where);
  std::string_view key = "quantization";
  const Json* block = config.find(key);
  if (!block || block->is_null()) block = config.find(key = "quantization_config");
  if (!block || block->is_null()) return declared;
  const std::string here = concat(declared.where, ": ", key);
  if (!block->object()) wrong_value(here, "an object", block);
  const Json* method = block->find("quant_method");
  // gpt_oss as it is published. Only its experts are quantised, and they have names of their own.
  if (method && method->string() && *method->string() == "mxfp4") return declared;
  if (method) wrong_value(concat(here, ": quant_method"), "\"mxfp4\", or none as in MLX's affine quantisation", method);
  declared.others = format_of(*block, here);
  for (const JsonMember& member : *block->object()) {
    if (member.key == "bits" || member.key == "group_size" || member.key == "mode") continue;
    const std::string place = concat(here, ": ", in_quotes(member.key));
    const bool* flag = member.value.boolean();
    if (!flag && !member.value.object()) wrong_value(place, "an object, true or false", &member.value);
    DeclaredFormat format{.quantized = false};
    if (!flag)
      format = format_of(member.value, place);
    else if (*flag)
      format = *declared.others;
    if (!declared.modules.emplace(canonical_module(member.key), format).second)
      throw FormatError(
          concat(place, ": expected one entry a module, found another of the same name with or without prefix"));
  }
  return declared;
}

}  // namespace moeflux
