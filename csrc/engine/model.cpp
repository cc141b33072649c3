#include "engine/model.h"

namespace moeflux {

Model load_model(const StoreDirectory& store, Backend& backend, const Progress& progress) {
  WeightLoader load(store, backend, progress);
  Model model(store.variant);
  const Variant& variant = store.variant;
  if (variant.begins()) model.embed = load.matrix("model.embed_tokens");
  if (variant.ends()) {
    model.head = load.matrix(variant.tied_embeddings ? "model.embed_tokens" : "lm_head");
    model.output.load({load, ""}, "model.norm.weight", "model.hyper_connection_mixer");
  }
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const LayerTensors tensors(load, store.prefix(static_cast<int64_t>(i)));
    LayerBlocks& layer = model.layers[i];
    if (layer.ngram) layer.ngram->load(tensors);
    layer.input.load(tensors, "input_layernorm.weight", "attn_hyper_connection");
    layer.mixer->load(tensors);
    layer.feed_forward->load(tensors);
  }
  if (variant.draft) model.draft.load({load, store.prefix(variant.num_layers())});
  model.weights = load.take();
  return model;
}

}  // namespace moeflux
