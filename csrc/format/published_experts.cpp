#include "format/published_experts.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "core/error.h"
#include "core/text.h"
#include "format/tensor_match.h"
#include "format/tensor_requirements.h"

namespace moeflux {
namespace {

constexpr std::string_view of_experts = ".experts.";

bool is_plain(DType dtype) { return dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f32; }

// gpt_oss has its experts in MXFP4: codes in blocks of 32, and their scales.
bool is_mxfp4_part(std::string_view name, const StoredTensor& tensor, const Variant& variant) {
  return variant.model_type == ModelType::gpt_oss && tensor.dtype == DType::u8 &&
         (name.ends_with("_blocks") || name.ends_with("_scales"));
}

// Why a family runs only once it is converted; nothing where it runs as it is.
std::string_view why_to_convert(const Variant& variant, const TensorTable& table) {
  const auto is_plain_pair = [](const auto& entry) { return entry.first.ends_with(".experts.gate_up_proj"); };
  if (variant.model_type == ModelType::gpt_oss && std::ranges::any_of(table, is_plain_pair))
    return "matrices are transposed, and rows of gate_proj and up_proj alternate";
  const bool latent = std::ranges::any_of(
      variant.layers, [](const Layer& layer) { return std::holds_alternative<LatentAttention>(layer.mixer); });
  return latent ? "latent attention is computed with kv_b_proj in two parts, of which one is transposed" : "";
}

bool is_hybrid(ModelType type) { return type == ModelType::qwen3_5_moe || type == ModelType::qwen3_next; }

[[noreturn]] void refuse(const StoreDirectory& store, std::string_view why) {
  throw FormatError(concat(printable(store.listing),
                           ": no routed experts found: expected tensors model.layers.N.mlp.switch_mlp.*; these are "
                           "experts as Hugging Face lays them out, which need converting: ",
                           why));
}

bool is_folded_norm(std::string_view name) {
  for (const char* norm : {".input_layernorm.weight", ".post_attention_layernorm.weight", "model.norm.weight",
                           ".q_norm.weight", ".k_norm.weight"})
    if (name.ends_with(norm)) return true;
  return false;
}

// Qwen's hybrids: norms are published as one less, and taps of the convolution [channels, 1, taps].
void adapt_hybrid(TensorTable& table, const StoreDirectory& store) {
  for (auto& [name, tensor] : table) {
    if (is_folded_norm(name)) {
      if (tensor.dtype == DType::f32) refuse(store, concat(in_quotes(name), " is F32"));
      tensor.added = 1;
    }
    if (name.ends_with(".conv1d.weight") && tensor.shape.size() == 3) std::swap(tensor.shape[1], tensor.shape[2]);
  }
}

class Taker {
 public:
  Taker(int64_t layer, TensorTable& table, const DeclaredFormats& declared, const StoreDirectory& store)
      : layer_(layer), table_(table), declared_(declared), store_(store) {}

  LayerExperts take() {
    const Variant& v = store_.variant;
    const int64_t inner = v.experts().intermediate;
    const std::string stack = base_of("gate_up_proj");
    if (!stack.empty()) return take_stacks(stack, base_of("down_proj"));
    if (v.model_type == ModelType::gpt_oss) return take_blocks(concat(layer_prefix(layer_), "mlp.experts."));
    LayerExperts found;
    found.formats.gate = take_each({"gate_proj", "w1"}, inner, v.hidden_size, found.places);
    found.formats.up = take_each({"up_proj", "w3"}, inner, v.hidden_size, found.places);
    found.formats.down = take_each({"down_proj", "w2"}, v.hidden_size, inner, found.places);
    return found;
  }

 private:
  // Gemma 4 has its experts beside another network, and not in it.
  std::string base_of(std::string_view part) const {
    for (const char* block : {"mlp.experts.", "experts."}) {
      std::string name = concat(layer_prefix(layer_), block, part);
      if (table_.contains(name)) return name;
    }
    return "";
  }

  // Most say it in the first word, Mixtral and MiniMax in the second.
  QuantFormat take_each(const std::array<std::string_view, 2>& words, int64_t rows, int64_t columns,
                        std::vector<ExpertPlace>& places) {
    ExpertPlace place;
    QuantFormat format;
    for (int64_t expert = 0; expert < store_.variant.experts().count; ++expert) {
      const auto base = [&](std::string_view word) {
        return concat(layer_prefix(layer_), "mlp.experts.", expert, ".", word);
      };
      const bool second = table_.contains(base(words[1]) + ".weight");
      const std::string name = base(words[second ? 1 : 0]);
      const QuantFormat found = matrix_format(name, {rows, columns}, table_, declared_, store_);
      if (expert == 0) format = found;
      if (!(found == format) || found.is_quantised())
        throw FormatError(concat(printable(store_.listing), ": tensor ", in_quotes(name + ".weight"),
                                 ": expected the type of those before, found ", found.describe()));
      const auto node = table_.extract(name + ".weight");
      const Span& whole = node.mapped().spans.front();
      place.each.push_back({whole.file, whole.offset});
    }
    places.push_back(std::move(place));
    return format;
  }

  LayerExperts take_stacks(const std::string& both, const std::string& down) {
    const Variant& v = store_.variant;
    const int64_t inner = v.experts().intermediate;
    const StoredTensor pair = take_stack(both, {v.experts().count, 2 * inner, v.hidden_size});
    const StoredTensor last = take_stack(down, {v.experts().count, v.hidden_size, inner});
    const Span& first = pair.spans.front();
    const int64_t half = first.bytes / (2 * v.experts().count);
    const Span& other = last.spans.front();
    const QuantFormat format = QuantFormat::plain(pair.dtype);
    return {{format, format, QuantFormat::plain(last.dtype)},
            {{first.file, first.offset, 2 * half},
             {first.file, first.offset + half, 2 * half},
             {other.file, other.offset, other.bytes / v.experts().count}}};
  }

  // gpt_oss: MXFP4, where a block of 32 numbers is 16 bytes, the codes as MLX packs them. Rows of gate and up
  // alternate, and so do the numbers of their biases.
  LayerExperts take_blocks(const std::string& at) {
    const Variant& v = store_.variant;
    const int64_t count = v.experts().count;
    const int64_t inner = v.experts().intermediate;
    take_biases(at);
    LayerExperts found;
    found.formats = {QuantFormat::mxfp4(), QuantFormat::mxfp4(), QuantFormat::mxfp4()};
    const std::vector<ExpertPlace> both = take_mxfp4(concat(at, "gate_up_proj"), count, 2 * inner, v.hidden_size);
    for (const int64_t first : {0, 1})
      for (const ExpertPlace& part : both) {
        const int64_t row = part.stride / (2 * inner);
        found.places.push_back({part.file, part.offset + first * row, part.stride, row});
      }
    for (ExpertPlace& part : take_mxfp4(concat(at, "down_proj"), count, v.hidden_size, inner))
      found.places.push_back(std::move(part));
    return found;
  }

  // Where the codes and the scales of a stack lie.
  std::vector<ExpertPlace> take_mxfp4(const std::string& name, int64_t count, int64_t rows, int64_t columns) {
    const int64_t group = QuantFormat::mxfp4().group_size;
    if (!QuantFormat::mxfp4().fits(columns))
      throw FormatError(concat(printable(store_.listing), ": ", in_quotes(name), ": expected whole blocks of ", group,
                               ", found ", columns, " columns"));
    std::vector<ExpertPlace> places;
    for (const auto& [part, shape] : {std::pair("_blocks", std::vector{count, rows, columns / group, group / 2}),
                                      std::pair("_scales", std::vector{count, rows, columns / group})}) {
      const StoredTensor stack = take_stack(name + part, shape);
      if (stack.dtype != DType::u8)
        refuse(store_, concat("tensor ", in_quotes(name + part), ": expected U8, found ", dtype_name(stack.dtype)));
      const Span& whole = stack.spans.front();
      places.push_back({whole.file, whole.offset, whole.bytes / count});
    }
    return places;
  }

  void take_biases(const std::string& at) {
    const int64_t count = store_.variant.experts().count;
    const int64_t inner = store_.variant.experts().intermediate;
    const std::string made = concat(layer_prefix(layer_), "mlp.switch_mlp.");
    StoredTensor both = take_stack(at + "gate_up_proj_bias", {count, 2 * inner});
    if (!is_plain(both.dtype) || both.dtype == DType::f32)
      refuse(store_, concat(in_quotes(at + "gate_up_proj_bias"), " is ", dtype_name(both.dtype)));
    both.shape.back() = inner;
    both.step = 2;
    table_[made + "gate_proj.bias"] = both;
    const auto one = static_cast<int64_t>(dtype_bytes(both.dtype));
    both.spans.front().offset += one;
    both.spans.front().bytes -= one;
    table_[made + "up_proj.bias"] = both;
    table_[made + "down_proj.bias"] = take_stack(at + "down_proj_bias", {count, store_.variant.hidden_size});
  }

  StoredTensor take_stack(const std::string& name, const std::vector<int64_t>& shape) {
    const auto node = table_.extract(name);
    if (node.empty())
      throw FormatError(concat(printable(store_.listing), ": expected a tensor ", in_quotes(name), " for ",
                               printable(store_.variant.name), ", found none"));
    if (node.mapped().shape != shape)
      refuse(store_, concat("tensor ", in_quotes(name), ": expected ", describe_shape(shape), ", found ",
                            describe_shape(node.mapped().shape)));
    return node.mapped();
  }

  int64_t layer_;
  TensorTable& table_;
  const DeclaredFormats& declared_;
  const StoreDirectory& store_;
};

}  // namespace

bool take_as_published(TensorTable& table, const StoreDirectory& store) {
  bool any = false;
  for (const auto& [name, tensor] : table) {
    if (name.find(of_experts) == std::string::npos) continue;
    any = true;
    if (!is_plain(tensor.dtype) && !is_mxfp4_part(name, tensor, store.variant))
      refuse(store, concat(in_quotes(name), " is ", dtype_name(tensor.dtype)));
  }
  if (const std::string_view why = why_to_convert(store.variant, table); any && !why.empty()) refuse(store, why);
  if (any && is_hybrid(store.variant.model_type)) adapt_hybrid(table, store);
  return any;
}

LayerExperts take_published_experts(int64_t layer, TensorTable& table, const DeclaredFormats& declared,
                                    const StoreDirectory& store) {
  return Taker(layer, table, declared, store).take();
}

}  // namespace moeflux
