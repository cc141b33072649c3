#include "format/gguf_order.h"

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "format/tensor_entry.h"
#include "format/tensor_requirements.h"

namespace moeflux {
namespace {

class Sorter {
 public:
  Sorter(TensorTable& table, const StoreDirectory& store) : table_(table), store_(store) {}

  // Row i of the tensor is row from(i) of the stored one, whose rows are `rows`.
  template <typename From>
  void rows(const std::string& name, int64_t rows, const From& from) {
    const auto found = table_.find(name);
    if (found == table_.end()) return;  // whoever matches all tensors says so
    StoredTensor& tensor = found->second;
    const Span whole = tensor.spans.front();
    if (tensor.shape.empty() || tensor.shape.front() != rows)
      throw FormatError(concat(printable(store_.files[static_cast<size_t>(whole.file)]), ": tensor ", in_quotes(name),
                               ": expected ", rows, " rows, found ", describe_shape(tensor.shape)));
    const int64_t row_bytes = whole.bytes / rows;
    tensor.spans.clear();
    for (int64_t row = 0; row < rows; ++row)
      append(tensor.spans, {whole.file, whole.offset + from(row) * row_bytes, row_bytes});
  }

 private:
  static void append(std::vector<Span>& spans, const Span& next) {
    if (!spans.empty() && spans.back().offset + spans.back().bytes == next.offset)
      spans.back().bytes += next.bytes;
    else
      spans.push_back(next);
  }

  TensorTable& table_;
  const StoreDirectory& store_;
};

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
  Sorter sorter(table, store);
  for (int64_t layer = 0; layer < v.num_layers(); ++layer) {
    const auto* attention = std::get_if<GroupedAttention>(&v.layer(layer).mixer);
    if (!attention) continue;
    const auto from = [&](int64_t row) { return paired_row(row, attention->head_dim); };
    const std::string prefix = layer_prefix(layer) + "self_attn.";
    sorter.rows(prefix + "q_proj.weight", attention->heads * attention->head_dim, from);
    sorter.rows(prefix + "k_proj.weight", attention->kv_heads * attention->head_dim, from);
  }
}

}  // namespace moeflux
