#include "format/expert_layout.h"

#include "core/error.h"
#include "models/check.h"

namespace moeflux {
namespace {

void append_piece(ExpertLayout& layout, std::string name, DType dtype, int64_t rows, int64_t row_bytes) {
  const int64_t columns = row_bytes / static_cast<int64_t>(dtype_bytes(dtype));
  layout.pieces.push_back({std::move(name), layout.bytes, rows * row_bytes, dtype, {rows, columns}});
  layout.bytes += rows * row_bytes;
}

void append_matrix(ExpertLayout& layout, const std::string& name, const QuantFormat& format, int64_t rows,
                   int64_t columns) {
  if (!format.fits(columns))
    throw FormatError(concat("expert ", name, ": expected whole groups of ", format.whole_columns(), " columns, found ",
                             columns, " columns"));
  append_piece(layout, name + ".weight", format.element, rows, format.weight_row_bytes(columns));
  if (!format.has_scales()) return;
  append_piece(layout, name + ".scales", format.scale_type, rows, format.scale_row_bytes(columns));
  if (format.is_affine())
    append_piece(layout, name + ".biases", format.scale_type, rows, format.scale_row_bytes(columns));
}

}  // namespace

std::string ExpertFormats::describe() const {
  return concat("gate_proj ", gate.describe(), ", up_proj ", up.describe(), ", down_proj ", down.describe());
}

ExpertLayout::ExpertLayout(int64_t hidden_size, int64_t intermediate_size, const ExpertFormats& expert_formats)
    : hidden(hidden_size), intermediate(intermediate_size), formats(expert_formats) {
  for (int64_t width : {hidden, intermediate})
    if (width < 1 || width > max_width)
      throw FormatError(concat("expert width: expected 1 to ", max_width, ", found ", width));
  append_matrix(*this, "gate_proj", formats.gate, intermediate, hidden);
  append_matrix(*this, "up_proj", formats.up, intermediate, hidden);
  append_matrix(*this, "down_proj", formats.down, hidden, intermediate);
}

}  // namespace moeflux
