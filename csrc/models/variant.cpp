#include "models/variant.h"

#include <algorithm>

#include "core/text.h"

namespace moeflux {

const RoutedExperts& Variant::experts() const {
  return *std::ranges::find_if(layers, [](const Layer& each) { return each.experts() != nullptr; })->experts();
}

int64_t Variant::moe_layers() const {
  return std::ranges::count_if(layers, [](const Layer& each) { return each.experts() != nullptr; });
}

StatePieces Variant::state(int64_t index) const {
  StatePieces pieces = std::visit([](const auto& each) { return each.state(); }, layer(index).mixer);
  if (const std::optional<NgramEmbedding>& ngram = layer(index).ngram)
    for (StatePiece& piece : ngram->state(stream_count(), hidden_size)) pieces.push_back(std::move(piece));
  return pieces;
}

bool has_tables(const Variant& variant) {
  return std::ranges::any_of(variant.layers, [](const Layer& layer) { return layer.ngram.has_value(); });
}

void check_variant(const Variant& v) {
  const Check check(printable(v.name));
  check.limits({{"layers", v.num_layers(), 1, max_layers},
                {"hidden_size", v.hidden_size, 1, max_width},
                {"vocab_size", v.vocab_size, 1, max_vocab},
                {"max_context", v.max_context, 1, max_context_limit}});
  check.positive("rms_norm_eps", v.rms_norm_eps);
  check.positive("embedding_scale", v.embedding_scale);
  check.require(v.logit_cap >= 0, "logit_cap", "0 or a positive number", v.logit_cap);
  check.whole_groups("hidden_size", v.hidden_size);
  if (v.streams) {
    v.streams->check(check);
    check.whole_groups("streams.rank", v.streams->rank);
  }
  check.require(v.moe_layers() > 0, "layers", "at least one layer with experts", "none");
  for (int64_t index = 0; index < v.num_layers(); ++index) {
    const Layer& layer = v.layer(index);
    const Check here(concat(printable(v.name), ": layer ", index));
    std::visit([&](const auto& mixer) { mixer.check(here); }, layer.mixer);
    std::visit([&](const auto& feed_forward) { feed_forward.check(here); }, layer.feed_forward);
    here.require(!layer.ngram || v.streams, "ngram", "none without residual streams", "one");
    if (layer.ngram) layer.ngram->check(here);
    here.require(!v.streams || layer.experts(), "feed_forward", "routed experts, as with residual streams", "another");
    // The norms of both halves have names that fit together.
    const auto* attention = std::get_if<GroupedAttention>(&layer.mixer);
    const bool framed = layer.experts() && layer.experts()->framed;
    here.require(!framed || !v.streams, "framed", "false with residual streams", "true");
    here.require((attention && attention->out_norm) == framed, "out_norm",
                 framed ? "true, as framed" : "false, as framed", framed ? "false" : "true");
    if (!layer.experts()) continue;
    const RoutedExperts& first = v.experts();
    const auto same = [&](std::string_view field, int64_t wanted, int64_t found) {
      here.require(found == wanted, field, concat(wanted, " as in the layers with experts before"), found);
    };
    same("count", first.count, layer.experts()->count);
    same("per_token", first.per_token, layer.experts()->per_token);
    same("intermediate", first.intermediate, layer.experts()->intermediate);
  }
}

}  // namespace moeflux
