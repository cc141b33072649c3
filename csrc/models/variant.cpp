#include "models/variant.h"

#include <algorithm>

#include "core/error.h"
#include "core/text.h"

namespace moeflux {

const RoutedExperts& Variant::experts() const {
  static const RoutedExperts none;
  const auto first = std::ranges::find_if(layers, [](const Layer& each) { return each.experts() != nullptr; });
  return first == layers.end() ? none : *first->experts();
}

std::string Variant::layers_named() const {
  const int64_t last = layers_before + num_layers() - 1;
  return concat("layers ", layers_before, " to ", last, " of ", last + 1 + layers_behind);
}

int64_t Variant::moe_layers() const {
  const int64_t before = std::ranges::count_if(layers, [](const Layer& each) { return each.experts() != nullptr; });
  return before + (draft && draft->experts() ? 1 : 0);
}

StatePieces Variant::state(int64_t index) const {
  StatePieces pieces = std::visit([](const auto& each) { return each.state(); }, layer(index).mixer);
  if (const std::optional<NgramEmbedding>& ngram = layer(index).ngram)
    for (StatePiece& piece : ngram->state(stream_count(), hidden_size)) pieces.push_back(std::move(piece));
  return pieces;
}

Variant draft_variant(const Variant& variant) {
  Variant alone = variant;
  alone.layers.clear();
  if (variant.draft) alone.layers.push_back(*variant.draft);
  alone.draft.reset();
  return alone;
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
  const bool any_experts = std::ranges::any_of(v.layers, [](const Layer& each) { return each.experts() != nullptr; });
  check.require(any_experts, "layers", "at least one layer with experts", "none");
  if (v.draft) {
    check.require(!v.streams, "draft", "none with residual streams", "one");
    check.require(v.embedding_scale == 1, "draft", "none with an embedding_scale", "one");
    const bool remembers = std::ranges::any_of(v.state(v.num_layers()),
                                               [](const StatePiece& each) { return !each.rows || each.window > 0; });
    check.require(!remembers && !v.draft->ngram, "draft", "a layer that attends to all rows", "another");
  }
  for (int64_t index = 0; index < v.all_layers(); ++index) {
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
