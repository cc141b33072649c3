#include "format/tensor_match.h"

#include <algorithm>

#include "core/error.h"
#include "core/text.h"
#include "format/tensor_requirements.h"

namespace moeflux {
namespace {

std::string place(const StoreDirectory& store, const StoredTensor& tensor, const std::string& name) {
  const std::string& file = store.files[static_cast<size_t>(tensor.spans.front().file)];
  return concat(printable(file), ": tensor ", in_quotes(name));
}

const StoredTensor& needed(const TensorTable& table, const std::string& name, const StoreDirectory& store) {
  const auto found = table.find(name);
  if (found == table.end())
    throw FormatError(concat(printable(store.listing), ": expected a tensor ", in_quotes(name), " for ",
                             printable(store.variant.name), ", found none"));
  return found->second;
}

bool is_float(DType dtype) { return dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f32; }

void check_float(const StoredTensor& tensor, const std::vector<int64_t>& shape, const std::string& where) {
  if (is_float(tensor.dtype) && tensor.shape == shape) return;
  throw FormatError(concat(where, ": expected BF16, F16 or F32 ", describe_shape(shape), ", found ",
                           describe_shape(tensor.dtype, tensor.shape)));
}

bool same_leading(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end() - 1, b.begin());
}

// These two find the bits of a code, and the columns of a group, from the words and the scales in a row. They return 0
// when that is no whole number.
int64_t bits_of_row(int64_t words, int64_t columns) {
  if (words > columns) return 0;  // more than 32 bits a column
  return words * 32 % columns == 0 ? words * 32 / columns : 0;
}

int64_t group_of_row(int64_t scales, int64_t columns) {
  return scales > 0 && columns % scales == 0 ? columns / scales : 0;
}

void check_part(const std::string& base, const char* part, const StoredTensor& tensor,
                const std::vector<int64_t>& shape, int64_t row, const QuantFormat& format,
                const StoreDirectory& store) {
  std::vector<int64_t> wanted = shape;
  wanted.back() = row;
  if (format.fits(shape.back()) && tensor.shape == wanted) return;
  throw FormatError(concat(place(store, tensor, base + part), ": expected ",
                           format.fits(shape.back()) ? describe_shape(wanted)
                                                     : concat("whole groups of ", format.whole_columns(), " columns"),
                           " of a ", describe_shape(shape), " matrix in ", format.describe(), ", found ",
                           describe_shape(tensor.dtype, tensor.shape)));
}

// Codes in words that are floats. The scales are of 8 bits, and there are no biases. Whoever matches all tensors finds
// any that are there. The shapes tell such formats apart. Where none fits, that of the scales is named, or MXFP4.
QuantFormat float_format(const std::string& base, const std::vector<int64_t>& shape, const StoredTensor& weight,
                         const StoredTensor& scales, const StoreDirectory& store) {
  const int64_t columns = shape.back();
  QuantFormat format = QuantFormat::mxfp4();
  const auto fits = [&](const QuantFormat& each) {
    return each.fits(columns) && same_leading(scales.shape, shape) &&
           scales.shape.back() == each.scale_row_bytes(columns);
  };
  for (const QuantFormat& each : {QuantFormat::nvfp4(true), QuantFormat::nvfp4(false)})
    if (fits(each)) format = each;
  if (fits(QuantFormat::mxfp8()) && weight.shape.back() == columns / 4) format = QuantFormat::mxfp8();
  check_part(base, ".weight", weight, shape, columns * format.bits / 32, format, store);
  check_part(base, ".scales", scales, shape, format.scale_row_bytes(columns), format, store);
  return format;
}

QuantFormat fp8_format(const std::string& base, const std::vector<int64_t>& shape, const StoredTensor& weight,
                       const TensorTable& table, const StoreDirectory& store) {
  const StoredTensor& scales = needed(table, base + ".scales", store);
  if (scales.dtype != DType::bf16 && scales.dtype != DType::f32)
    throw FormatError(concat(place(store, scales, base + ".scales"), ": expected BF16 or F32 scales of FP8, found ",
                             describe_shape(scales.dtype, scales.shape)));
  const QuantFormat format = QuantFormat::fp8(scales.dtype);
  check_part(base, ".weight", weight, shape, shape.back(), format, store);
  check_part(base, ".scales", scales, shape, shape.back() / format.group_size, format, store);
  return format;
}

QuantFormat affine_format(const std::string& base, const std::vector<int64_t>& shape, const StoredTensor& weight,
                          const TensorTable& table, const StoreDirectory& store) {
  const std::string where = place(store, weight, base + ".weight");
  const int64_t columns = shape.back();
  if (!same_leading(weight.shape, shape))
    throw FormatError(concat(where, ": expected the packed codes of a ", describe_shape(shape), " matrix, found ",
                             describe_shape(weight.dtype, weight.shape)));
  const StoredTensor& scales = needed(table, base + ".scales", store);
  if (scales.dtype == DType::u8) return float_format(base, shape, weight, scales, store);
  const StoredTensor& biases = needed(table, base + ".biases", store);
  if (!is_float(scales.dtype) || !same_leading(scales.shape, shape))
    throw FormatError(concat(place(store, scales, base + ".scales"), ": expected BF16, F16 or F32 scales of a ",
                             describe_shape(shape), " matrix, found ", describe_shape(scales.dtype, scales.shape)));
  if (biases.dtype != scales.dtype || biases.shape != scales.shape)
    throw FormatError(concat(place(store, biases, base + ".biases"), ": expected ",
                             describe_shape(scales.dtype, scales.shape), " as the scales are, found ",
                             describe_shape(biases.dtype, biases.shape)));
  try {
    return QuantFormat::affine(static_cast<int>(bits_of_row(weight.shape.back(), columns)),
                               static_cast<int>(group_of_row(scales.shape.back(), columns)), scales.dtype);
  } catch (const FormatError& error) {
    throw FormatError(concat(where, ": ", error.what(), " (", weight.shape.back(), " words and ", scales.shape.back(),
                             " scales for ", columns, " columns)"));
  }
}

QuantFormat blocks_format(const StoredTensor& weight, const std::vector<int64_t>& shape, const std::string& where) {
  const QuantFormat format = QuantFormat::blocks(weight.block);
  std::vector<int64_t> wanted = shape;
  wanted.back() = format.weight_row_bytes(shape.back());
  if (!format.fits(shape.back()) || weight.shape != wanted)
    throw FormatError(concat(where, ": expected ", format.describe(), " ", describe_shape(shape), " in rows of whole ",
                             "blocks, which are bytes ", describe_shape(wanted), ", found ",
                             describe_shape(weight.shape)));
  return format;
}

void take(const std::string& name, TensorKind kind, TensorTable& table, StoreDirectory& store) {
  auto node = table.extract(name);
  if (node.empty()) return;
  node.mapped().kind = kind;
  store.tensors.insert(std::move(node));
}

}  // namespace

void add_stored_tensor(const TensorEntry& entry, int64_t file, TensorTable& table, StoreDirectory& store,
                       BlockType block) {
  std::string name = canonical_name(entry.name);
  if (is_unused_tensor(store.variant, name)) {
    store.ignored.push_back(entry.name);
    return;
  }
  StoredTensor tensor{entry.dtype, entry.shape, {{file, entry.offset, entry.bytes}}};
  tensor.block = block;
  const auto [found, inserted] = table.emplace(name, tensor);
  if (!inserted)
    throw FormatError(concat(place(store, tensor, entry.name), ": expected it once, found ", in_quotes(name), " in ",
                             printable(store.files[static_cast<size_t>(found->second.spans.front().file)]),
                             " too (with and without the prefix language_model.)"));
}

QuantFormat matrix_format(const std::string& base, const std::vector<int64_t>& shape, const TensorTable& table,
                          const DeclaredFormats& declared, const StoreDirectory& store) {
  const StoredTensor& weight = needed(table, base + ".weight", store);
  const std::string where = place(store, weight, base + ".weight");
  // These say themselves what they are.
  if (weight.block != BlockType::none) return blocks_format(weight, shape, where);
  if (weight.dtype == DType::f8_e4m3) return fp8_format(base, shape, weight, table, store);
  QuantFormat format;
  if (weight.dtype == DType::u32) {
    format = affine_format(base, shape, weight, table, store);
  } else {
    if (!is_float(weight.dtype))
      throw FormatError(
          concat(where, ": expected U32, BF16, F16 or F32, found ", describe_shape(weight.dtype, weight.shape)));
    check_float(weight, shape, where);
    format = QuantFormat::plain(weight.dtype);
  }
  declared.check(base, format, where);
  return format;
}

void match_tensors(TensorTable table, const DeclaredFormats& declared, StoreDirectory& store) {
  const auto has = [&](const std::string& name) { return table.contains(name); };
  for (const TensorRequirement& wanted : tensor_requirements(store.variant, has)) {
    if (is_vector(wanted.kind) || wanted.kind == TensorKind::table) {
      const StoredTensor& tensor = needed(table, wanted.name, store);
      check_float(tensor, wanted.shape, place(store, tensor, wanted.name));
      take(wanted.name, wanted.kind, table, store);
      continue;
    }
    const QuantFormat format = matrix_format(wanted.name, wanted.shape, table, declared, store);
    store.formats.emplace(wanted.name, format);
    take(wanted.name + ".weight", wanted.kind, table, store);
    if (format.has_scales()) take(wanted.name + ".scales", wanted.kind, table, store);
    if (format.is_affine()) take(wanted.name + ".biases", wanted.kind, table, store);
  }
  if (!table.empty()) {
    const auto& [name, tensor] = *table.begin();
    throw FormatError(concat(place(store, tensor, name), ": expected only tensors of ", printable(store.variant.name),
                             ", found ", describe_shape(tensor.dtype, tensor.shape), " that it does not have (",
                             table.size(), " such tensors)"));
  }
}

}  // namespace moeflux
