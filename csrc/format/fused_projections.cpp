#include "format/fused_projections.h"

#include "core/error.h"
#include "core/text.h"
#include "format/tensor_requirements.h"

namespace moeflux {

StoredTensor take_rows(const StoredTensor& stored, const std::vector<std::pair<int64_t, int64_t>>& ranges) {
  const Span& whole = stored.spans.front();
  const int64_t row_bytes = whole.bytes / stored.shape.front();
  StoredTensor tensor = stored;
  tensor.spans.clear();
  tensor.shape.front() = 0;
  for (const auto& [first, rows] : ranges) {
    const Span span{whole.file, whole.offset + first * row_bytes, rows * row_bytes};
    tensor.shape.front() += rows;
    const bool continues =
        !tensor.spans.empty() && tensor.spans.back().offset + tensor.spans.back().bytes == span.offset;
    if (continues)
      tensor.spans.back().bytes += span.bytes;
    else
      tensor.spans.push_back(span);
  }
  return tensor;
}

namespace {

// The rows of a key head that belong to one canonical projection.
struct Slice {
  const char* projection;
  int64_t first;
  int64_t rows;
};

class Splitter {
 public:
  Splitter(TensorTable& table, DeclaredFormats& declared, const StoreDirectory& store)
      : table_(table), declared_(declared), store_(store) {}

  // `slices` divide the rows of each of `heads`; those of one projection stand together, in its row order.
  void split(const std::string& prefix, const std::string& fused, int64_t heads, const std::vector<Slice>& slices) {
    int64_t head_rows = 0;
    for (const Slice& slice : slices) head_rows += slice.rows;
    for (const char* part : {".weight", ".scales", ".biases"}) {
      const auto node = table_.extract(prefix + fused + part);
      if (node.empty()) continue;
      check_rows(node.key(), node.mapped(), head_rows * heads);
      for (size_t i = 0; i < slices.size();) {
        const std::string projection = slices[i].projection;
        std::vector<std::pair<int64_t, int64_t>> ranges;
        for (; i < slices.size() && slices[i].projection == projection; ++i)
          for (int64_t head = 0; head < heads; ++head)
            ranges.emplace_back(head * head_rows + slices[i].first, slices[i].rows);
        insert(prefix + projection + part, take_rows(node.mapped(), ranges), node.key());
      }
    }
    const auto said = declared_.modules.find(prefix + fused);
    if (said == declared_.modules.end()) return;
    const DeclaredFormat format = said->second;
    for (const Slice& slice : slices) declared_.modules[prefix + slice.projection] = format;
  }

 private:
  std::string place(const StoredTensor& tensor, const std::string& name) const {
    return concat(printable(store_.files[static_cast<size_t>(tensor.spans.front().file)]), ": tensor ",
                  in_quotes(name));
  }

  void check_rows(const std::string& name, const StoredTensor& fused, int64_t rows) const {
    if (fused.shape.size() != 2 || fused.shape.front() != rows)
      throw FormatError(concat(place(fused, name), ": expected a matrix of ", rows, " rows, found ",
                               describe_shape(fused.dtype, fused.shape)));
  }

  void insert(const std::string& name, StoredTensor tensor, const std::string& fused) {
    if (table_.contains(name))
      throw FormatError(
          concat(place(table_.at(name), name), ": expected either it or ", in_quotes(fused), ", found both"));
    table_.emplace(name, std::move(tensor));
  }

  TensorTable& table_;
  DeclaredFormats& declared_;
  const StoreDirectory& store_;
};

}  // namespace

void split_fused_projections(TensorTable& table, DeclaredFormats& declared, const StoreDirectory& store) {
  const Variant& v = store.variant;
  Splitter splitter(table, declared, store);
  for (int64_t layer = 0; layer < v.num_layers(); ++layer) {
    const auto* delta = std::get_if<GatedDelta>(&v.layer(layer).mixer);
    if (!delta) continue;
    const std::string prefix = layer_prefix(layer) + "linear_attn.";
    const int64_t values = delta->value_heads / delta->key_heads;
    const int64_t dk = delta->key_dim;
    const int64_t dv = values * delta->value_dim;
    splitter.split(
        prefix, "in_proj_qkvz", delta->key_heads,
        {{"in_proj_qkv", 0, dk}, {"in_proj_qkv", dk, dk}, {"in_proj_qkv", 2 * dk, dv}, {"in_proj_z", 2 * dk + dv, dv}});
    splitter.split(prefix, "in_proj_ba", delta->key_heads, {{"in_proj_b", 0, values}, {"in_proj_a", values, values}});
  }
}

}  // namespace moeflux
