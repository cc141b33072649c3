#include "format/gguf_store.h"

#include <algorithm>
#include <string>
#include <utility>
#include <variant>

#include "core/error.h"
#include "core/text.h"
#include "format/fused_projections.h"
#include "format/gguf_names.h"
#include "format/gguf_order.h"
#include "format/tensor_match.h"
#include "format/tensor_requirements.h"

namespace moeflux {
namespace {

std::string place(const StoreDirectory& store, int64_t file, const std::string& name) {
  return concat(printable(store.files[static_cast<size_t>(file)]), ": tensor ", in_quotes(name));
}

StoredTensor stored_tensor(const GgufTensor& tensor, const std::string& where) {
  StoredTensor made{DType::u8, tensor.shape, {{tensor.file, tensor.offset, tensor.bytes}}};
  made.block = tensor.type.block;
  if (made.block != BlockType::none) {
    made.shape.back() = made.shape.back() / tensor.type.columns * tensor.type.bytes;
    return made;
  }
  for (const DType type : {DType::f32, DType::f16, DType::bf16})
    if (dtype_name(type) == tensor.type.name) {
      made.dtype = type;
      return made;
    }
  std::string known;
  for (const BlockShape& shape : block_shapes) known += concat(", ", shape.name);
  throw FormatError(concat(where, ": type: expected F32, F16, BF16", known, ", found ", tensor.type.name));
}

// Layers behind the last are for multi-token prediction. What gemma4's ropes do not turn is said by the variant.
bool is_unused(const Variant& variant, const std::string& stored, const std::string& canonical) {
  if (variant.model_type == ModelType::gemma4 && stored == "rope_freqs.weight") return true;
  return layer_of_gguf(stored) >= variant.num_layers() || is_unused_tensor(variant, canonical);
}

TensorTable table_of(const Gguf& model, StoreDirectory& store) {
  TensorTable table;
  for (const auto& [stored, tensor] : model.tensors) {
    const std::string where = place(store, tensor.file, stored);
    const std::string name = name_of_gguf(store.variant, stored).value_or("");
    if (is_unused(store.variant, stored, name)) {
      store.ignored.push_back(stored);
      continue;
    }
    if (name.empty())
      throw FormatError(concat(where, ": expected only tensors of ", printable(store.variant.name), ", found ",
                               tensor.type.name, " ", describe_shape(tensor.shape),
                               " of a name that it does not have"));
    if (!table.emplace(name, stored_tensor(tensor, where)).second)
      throw FormatError(concat(where, ": expected one tensor for ", in_quotes(name), ", found another"));
  }
  return table;
}

std::vector<int64_t> without_ones(std::vector<int64_t> shape) {
  std::erase(shape, 1);
  return shape;
}

// A dimension of one is left out, or not: taps are [channels, taps], and a matrix of one row may be a vector.
void fit_shapes(TensorTable& table, const Variant& variant) {
  const auto has = [&](const std::string& name) { return table.contains(name); };
  for (const TensorRequirement& wanted : tensor_requirements(variant, has))
    for (const std::string& name : {wanted.name, wanted.name + ".weight"}) {
      const auto found = table.find(name);
      if (found != table.end() && without_ones(found->second.shape) == without_ones(wanted.shape))
        found->second.shape = wanted.shape;
    }
}

// Files have -exp(A_log), which is what is computed with.
void restore_decays(TensorTable& table) {
  for (auto& [name, tensor] : table) tensor.negated_exp = name.ends_with(".linear_attn.A_log");
}

// ---- Experts --------------------------------------------------------------------------------------------------------

struct Stack {
  QuantFormat format;
  ExpertPlace place;
};

class ExpertTaker {
 public:
  ExpertTaker(TensorTable& table, StoreDirectory& store) : table_(table), store_(store) {}

  // Moves the experts of a layer out of the table.
  void take(int64_t layer) {
    const Variant& v = store_.variant;
    const std::string base = concat(layer_prefix(layer), "mlp.switch_mlp.");
    const int64_t inner = v.experts().intermediate;
    std::array<Stack, 3> stacks;
    if (table_.contains(base + "gate_up_proj.weight")) {
      const Stack both = take_stack(base + "gate_up_proj", 2 * inner, v.hidden_size);
      stacks[0] = stacks[1] = both;
      stacks[1].place.offset += both.place.stride / 2;
    } else {
      stacks[0] = take_stack(base + "gate_proj", inner, v.hidden_size);
      stacks[1] = take_stack(base + "up_proj", inner, v.hidden_size);
    }
    stacks[2] = take_stack(base + "down_proj", v.hidden_size, inner);
    const ExpertFormats formats = {stacks[0].format, stacks[1].format, stacks[2].format};
    const ExpertLayout& layout = store_.layouts[static_cast<size_t>(layer)] =
        ExpertLayout(v.hidden_size, inner, formats);
    if (layout.bytes > store_.experts.bytes) store_.experts = layout;
    for (const Stack& stack : stacks) store_.expert_places[static_cast<size_t>(layer)].push_back(stack.place);
  }

 private:
  Stack take_stack(const std::string& base, int64_t rows, int64_t columns) {
    const int64_t experts = store_.variant.experts().count;
    const QuantFormat format = matrix_format(base, {experts, rows, columns}, table_, {}, store_);
    const auto node = table_.extract(base + ".weight");
    const Span& whole = node.mapped().spans.front();
    return {format, {whole.file, whole.offset, whole.bytes / experts}};
  }

  TensorTable& table_;
  StoreDirectory& store_;
};

// Quantisers give layers of their choice more bits than others.
void take_experts(TensorTable& table, StoreDirectory& store) {
  const Variant& v = store.variant;
  store.expert_places.resize(static_cast<size_t>(v.num_layers()));
  store.layouts.resize(static_cast<size_t>(v.num_layers()));
  ExpertTaker taker(table, store);
  for (int64_t layer = 0; layer < v.num_layers(); ++layer)
    if (v.is_moe(layer)) taker.take(layer);
  const bool differ = std::ranges::any_of(store.layouts, [&](const ExpertLayout& layout) {
    return !layout.pieces.empty() && !(layout.formats == store.experts.formats);
  });
  if (!differ) store.layouts.clear();
}

}  // namespace

StoreDirectory open_gguf(const Gguf& model, const Variant& variant) {
  StoreDirectory store;
  store.variant = variant;
  store.files = model.files;
  store.listing = model.files.front();
  TensorTable table = table_of(model, store);
  DeclaredFormats declared;
  split_fused_projections(table, declared, store);
  take_experts(table, store);
  fit_shapes(table, variant);
  restore_order(table, store);
  restore_decays(table);
  match_tensors(std::move(table), declared, store);
  return store;
}

}  // namespace moeflux
