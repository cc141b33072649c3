// What a store says about the quantisation of its matrices, in its manifest or its config.json. The stored shapes
// decide. A statement that disagrees with them is an error, because one of the two is damaged.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "core/quant_format.h"
#include "format/json.h"
#include "format/manifest.h"

namespace moeflux {

struct DeclaredFormat {
  bool quantized = true;
  int64_t bits = 0;        // 0: not said
  int64_t group_size = 0;  // 0: not said
  std::string mode = "";   // as MLX calls it; empty: not said
};

struct DeclaredFormats {
  std::string where;                              // the file that says it
  std::optional<DeclaredFormat> others;           // of quantised matrices without an entry; nothing if there are none
  std::map<std::string, DeclaredFormat> modules;  // by canonical base name

  // FormatError when `found` contradicts what is said of `base`. `tensor` begins the message: the file and tensor
  // found.
  void check(const std::string& base, const QuantFormat& found, std::string_view tensor) const;
};

// From "bits" of the entries that hold codes.
DeclaredFormats declared_by_manifest(const Manifest& manifest, std::string where);

// Modes are affine, mxfp4, mxfp8 and nvfp4. From "quantization" (or "quantization_config") of an MLX config.json. It
// has bits, group_size and mode for all modules, and entries for single ones: an object of the same members, true for
// the common values, false for no quantisation. gpt_oss says quant_method mxfp4 as it is published, which declares
// nothing about other matrices than its experts.
DeclaredFormats declared_by_config(const Json& config, std::string where);

}  // namespace moeflux
