#include "engine/model.h"

#include "format/tensor_requirements.h"

namespace moeflux {

Model load_model(const StoreDirectory& store, Backend& backend, const Progress& progress) {
  WeightLoader load(store, backend, progress);
  Model model;
  model.variant = store.variant;
  model.embed = load.matrix("model.embed_tokens");
  model.head = store.variant.tied_embeddings ? model.embed : load.matrix("lm_head");
  model.norm = load.vector("model.norm.weight");
  model.layers = make_blocks(store.variant);
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const LayerTensors tensors(load, layer_prefix(static_cast<int64_t>(i)));
    LayerBlocks& layer = model.layers[i];
    layer.input_norm = tensors.vector("input_layernorm.weight");
    layer.mixer->load(tensors);
    layer.feed_forward->load(tensors);
  }
  model.weights = load.take();
  return model;
}

}  // namespace moeflux
