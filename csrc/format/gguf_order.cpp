#include "format/gguf_order.h"

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "format/fused_projections.h"
#include "format/tensor_entry.h"
#include "format/tensor_requirements.h"

namespace moeflux {
namespace {

// Row i of the tensor is row from(i) of the stored one, whose rows are `rows`.
template <typename From>
void sort_rows(TensorTable& table, const StoreDirectory& store, const std::string& name, int64_t rows,
               const From& from) {
  const auto found = table.find(name);
  if (found == table.end()) return;  // whoever matches all tensors says so
  StoredTensor& tensor = found->second;
  if (tensor.shape.empty() || tensor.shape.front() != rows)
    throw FormatError(concat(printable(store.files[static_cast<size_t>(tensor.spans.front().file)]), ": tensor ",
                             in_quotes(name), ": expected ", rows, " rows, found ", describe_shape(tensor.shape)));
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (int64_t row = 0; row < rows; ++row) ranges.emplace_back(from(row), 1);
  tensor = take_rows(tensor, ranges);
}

// Pairs that turn together lie side by side in the file, and half a head apart here.
int64_t paired_row(int64_t row, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  const int64_t in_head = row % head_dim;
  return row - in_head + 2 * (in_head % half) + in_head / half;
}

}  // namespace

void restore_order(TensorTable& table, const StoreDirectory& store) {
  const Variant& v = store.variant;
  if (v.model_type != ModelType::mixtral) return;
  for (int64_t layer = 0; layer < v.num_layers(); ++layer) {
    const auto* attention = std::get_if<GroupedAttention>(&v.layer(layer).mixer);
    if (!attention) continue;
    const auto from = [&](int64_t row) { return paired_row(row, attention->head_dim); };
    const std::string prefix = layer_prefix(layer) + "self_attn.";
    sort_rows(table, store, prefix + "q_proj.weight", attention->heads * attention->head_dim, from);
    sort_rows(table, store, prefix + "k_proj.weight", attention->kv_heads * attention->head_dim, from);
  }
}

}  // namespace moeflux
