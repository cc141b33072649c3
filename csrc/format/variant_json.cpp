#include "format/variant_json.h"

#include <algorithm>
#include <string>

#include "format/json_fields.h"
#include "format/variant_v1.h"

namespace moeflux {
namespace {

// What a layer is made of, as numbers into the lists of parts. Without an n-gram embedding there are two.
struct LayerParts {
  int64_t mixer = 0;
  int64_t feed_forward = 0;
  int64_t ngram = -1;
  bool operator==(const LayerParts&) const = default;
};

void read_value(LayerParts& out, const Json& json, const std::string& where) {
  if (!json.array() || (json.array()->size() != 2 && json.array()->size() != 3))
    wrong_value(where, "a mixer's number, a feed-forward part's, and an n-gram embedding's if it has one", &json);
  read_value(out.mixer, (*json.array())[0], where + "[0]");
  read_value(out.feed_forward, (*json.array())[1], where + "[1]");
  if (json.array()->size() == 3) read_value(out.ngram, (*json.array())[2], where + "[2]");
}

Json written(const LayerParts& parts) {
  Json::Array numbers = {Json(Json::Value(parts.mixer)), Json(Json::Value(parts.feed_forward))};
  if (parts.ngram >= 0) numbers.push_back(Json(Json::Value(parts.ngram)));
  return Json(std::move(numbers));
}

// A variant as it is written: parts that are alike are listed once, in the order in which layers first have them.
struct Written {
  Variant v;
  std::vector<Mixer> mixers;
  std::vector<FeedForward> feed_forwards;
  std::vector<NgramEmbedding> ngrams;
  std::vector<LayerParts> layers;
  std::vector<LayerParts> draft;  // one, or none

  template <typename Self, typename Visit>
  static void each_field(Self& self, const Visit& visit) {
    visit("name", self.v.name);
    visit("model_type", self.v.model_type);
    visit("hidden_size", self.v.hidden_size);
    visit("vocab_size", self.v.vocab_size);
    visit("rms_norm_eps", self.v.rms_norm_eps);
    visit("max_context", self.v.max_context);
    visit("tied_embeddings", self.v.tied_embeddings, false);
    visit("embedding_scale", self.v.embedding_scale, 1.0);
    visit("logit_cap", self.v.logit_cap, 0.0);
    visit("streams", self.v.streams, std::nullopt);
    visit("mixers", self.mixers);
    visit("feed_forwards", self.feed_forwards);
    visit("ngrams", self.ngrams, std::vector<NgramEmbedding>{});
    visit("layers", self.layers);
    visit("draft", self.draft, std::vector<LayerParts>{});
    visit("eos_ids", self.v.eos_ids, std::vector<int64_t>{});
    visit("bos_id", self.v.bos_id, int64_t{-1});
    visit("think_start_id", self.v.think_start_id, int64_t{-1});
    visit("think_end_id", self.v.think_end_id, int64_t{-1});
    visit("lossy", self.v.lossy, std::vector<std::string>{});
  }
};

template <typename Part>
const Part& part_of(const std::vector<Part>& parts, int64_t number, const std::string& where) {
  if (number < 0 || number >= static_cast<int64_t>(parts.size()))
    throw FormatError(concat(where, ": expected 0 to ", static_cast<int64_t>(parts.size()) - 1, ", found ", number));
  return parts[static_cast<size_t>(number)];
}

template <typename Part>
int64_t number_of(std::vector<Part>& parts, const Part& part) {
  const auto found = std::ranges::find(parts, part);
  const int64_t number = found - parts.begin();
  if (found == parts.end()) parts.push_back(part);
  return number;
}

Layer layer_of(const Written& file, const LayerParts& parts, const std::string& where) {
  Layer layer = {part_of(file.mixers, parts.mixer, where + "[0]"),
                 part_of(file.feed_forwards, parts.feed_forward, where + "[1]"),
                 {}};
  if (parts.ngram != -1) layer.ngram = part_of(file.ngrams, parts.ngram, where + "[2]");
  return layer;
}

Variant variant_of(Written file, const std::string& where) {
  for (size_t i = 0; i < file.layers.size(); ++i)
    file.v.layers.push_back(layer_of(file, file.layers[i], concat(where, ".layers[", i, "]")));
  if (file.draft.size() > 1)
    throw FormatError(concat(where, ".draft: expected one layer or none, found ", file.draft.size()));
  if (!file.draft.empty()) file.v.draft = layer_of(file, file.draft.front(), where + ".draft[0]");
  return std::move(file.v);
}

}  // namespace

Variant parse_variant(std::string_view text, std::string_view where) {
  return variant_from_json(parse_json(text, where), where);
}

Variant variant_from_json(const Json& json, std::string_view where, int version) {
  const std::string here(where);
  Variant variant;
  if (version == 1) {
    VariantV1 fields;
    read_fields(fields, json, here);
    check_fields(fields);
    variant = variant_of(fields);
  } else {
    Written file;
    read_fields(file, json, here);
    variant = variant_of(std::move(file), here);
  }
  check_variant(variant);
  return variant;
}

Json variant_to_json(const Variant& variant) {
  Written file = {variant, {}, {}, {}, {}, {}};
  const auto parts_of = [&](const Layer& layer) {
    return LayerParts{number_of(file.mixers, layer.mixer), number_of(file.feed_forwards, layer.feed_forward),
                      layer.ngram ? number_of(file.ngrams, *layer.ngram) : -1};
  };
  for (const Layer& layer : variant.layers) file.layers.push_back(parts_of(layer));
  if (variant.draft) file.draft.push_back(parts_of(*variant.draft));
  return written(file);
}

std::optional<Json> variant_to_json_1(const Variant& variant) {
  const VariantV1 fields = fields_of(variant);
  const bool mixes =
      fields.attention == AttentionWord::mla && std::ranges::count(fields.layer_kinds, LayerWord::linear);
  if (mixes || variant_of(fields) != variant) return {};
  return written(fields);
}

}  // namespace moeflux
