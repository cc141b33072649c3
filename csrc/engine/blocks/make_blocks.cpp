#include "engine/blocks/make_blocks.h"

#include <variant>

#include "engine/blocks/dense.h"
#include "engine/blocks/gated_delta.h"
#include "engine/blocks/grouped_attention.h"
#include "engine/blocks/latent_attention.h"
#include "engine/blocks/routed_experts.h"

namespace moeflux {
namespace {

template <typename... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};

std::unique_ptr<MixerBlock> mixer_block(const Mixer& mixer, const Stream& stream) {
  using Made = std::unique_ptr<MixerBlock>;
  return std::visit(
      Overloaded{
          [&](const GroupedAttention& shape) -> Made { return std::make_unique<GroupedAttentionBlock>(shape, stream); },
          [&](const LatentAttention& shape) -> Made { return std::make_unique<LatentAttentionBlock>(shape, stream); },
          [&](const GatedDelta& shape) -> Made { return std::make_unique<GatedDeltaBlock>(shape, stream); },
      },
      mixer);
}

}  // namespace

Stream stream_of(const Variant& variant) {
  Stream stream = {variant.hidden_size, static_cast<float>(variant.rms_norm_eps)};
  if (variant.streams) stream.count = variant.streams->count, stream.rank = variant.streams->rank;
  return stream;
}

std::vector<LayerBlocks> make_blocks(const Variant& variant) {
  const Stream stream = stream_of(variant);
  std::vector<LayerBlocks> blocks;
  RoutedExpertsBlock* before = nullptr;  // of the layer before
  for (int64_t index = 0; index < variant.all_layers(); ++index) {
    const Layer& layer = variant.layer(index);
    LayerBlocks& made = blocks.emplace_back(stream);
    if (index == variant.num_layers()) before = nullptr;  // nobody looks ahead to the one that drafts
    if (layer.ngram) made.ngram = std::make_unique<NgramRowsBlock>(*layer.ngram, stream, index);
    made.mixer = mixer_block(layer.mixer, stream);
    if (const RoutedExperts* experts = layer.experts()) {
      auto block = std::make_unique<RoutedExpertsBlock>(*experts, stream, index);
      if (before) before->set_next(block.get());
      before = block.get();
      made.feed_forward = std::move(block);
    } else {
      made.feed_forward = std::make_unique<DenseBlock>(std::get<DenseMlp>(layer.feed_forward), stream);
      before = nullptr;
    }
  }
  return blocks;
}

}  // namespace moeflux
