#include "python/op_arguments.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "core/error.h"
#include "python/bindings.h"

namespace moeflux::python {
namespace {

constexpr int64_t head_gap = 3;
constexpr int64_t row_gap = 5;
constexpr int64_t block_gap = 64;          // bytes before the rows of a kind
constexpr uint32_t gap_bits = 0x7fc12345;  // a NaN: one that is read spoils the result
constexpr int64_t scale_bytes = 2;         // behind the codes of a head, in arrays

std::string shape_text(const Shape& shape) {
  std::string text;
  for (const int64_t length : shape) text += (text.empty() ? "" : ", ") + (length < 0 ? "*" : std::to_string(length));
  return shape.size() == 1 ? "(" + text + ",)" : "(" + text + ")";
}

template <typename Element>
py::array_t<Element> array_of(const Element* values, const Shape& shape) {
  py::array_t<Element> array(shape);
  std::memcpy(array.mutable_data(), values, static_cast<size_t>(array.nbytes()));
  return array;
}

}  // namespace

void OpArguments::refuse(const char* name, const std::string& expected, const std::string& found) const {
  throw ArgumentError(concat("[", op_, "] ", name, ": expected ", expected, ", found ", found));
}

void OpArguments::require(bool holds, const char* name, const std::string& expected, int64_t found) const {
  if (!holds) refuse(name, expected, std::to_string(found));
}

void OpArguments::require_numbers(const char* name, const py::array& array) const {
  for (py::ssize_t i = 0; i < array.ndim(); ++i)
    if (array.shape(i) == 0) refuse(name, "at least 1 in every dimension", text_of(array.attr("shape")));
}

void OpArguments::require_groups(const char* name, int64_t heads, int64_t kv_heads) const {
  require(kv_heads > 0 && heads % kv_heads == 0, name, concat("heads that divide ", heads), kv_heads);
}

void OpArguments::check(const char* name, const py::array& array, const std::vector<py::dtype>& types,
                        const Shape& shape) const {
  bool fits = array.ndim() == static_cast<py::ssize_t>(shape.size()) && (array.flags() & py::array::c_style);
  for (size_t i = 0; fits && i < shape.size(); ++i)
    fits = shape[i] < 0 || array.shape(static_cast<py::ssize_t>(i)) == shape[i];
  bool typed = false;
  std::string names;
  for (const py::dtype& type : types) {
    typed = typed || array.dtype().equal(type);
    names += (names.empty() ? "" : " or ") + text_of(type);
  }
  if (!fits || !typed)
    refuse(name, concat(names, " ", shape_text(shape), " contiguous"),
           concat(text_of(array.dtype()), " ", text_of(array.attr("shape"))));
}

View OpArguments::allocate(int64_t bytes) {
  buffers_.emplace_back(backend_, bytes, op_);
  return buffers_.back().begin().device;
}

void OpArguments::upload(Commands& commands) const {
  for (const MirroredBuffer& each : buffers_) each.begin().upload(commands, each.begin().device.buffer->bytes());
}

void OpArguments::download(Commands& commands) const {
  for (const MirroredBuffer& each : buffers_) each.begin().download(commands, each.begin().device.buffer->bytes());
}

Mirrored OpArguments::mirrored(const View& view) const {
  const auto own = [&](const MirroredBuffer& each) { return each.begin().device.buffer == view.buffer; };
  return std::ranges::find_if(buffers_, own)->begin().at(view.offset, 1);
}

View OpArguments::copy(const py::array& array) {
  const View view = allocate(array.nbytes());
  std::memcpy(values<std::byte>(view), array.data(), static_cast<size_t>(array.nbytes()));
  return view;
}

View OpArguments::floats(const char* name, const py::array& array, const Shape& shape) {
  check(name, array, {py::dtype::of<float>()}, shape);
  return copy(array);
}

View OpArguments::ints(const char* name, const py::array& array, const Shape& shape) {
  check(name, array, {py::dtype::of<int32_t>()}, shape);
  return copy(array);
}

View OpArguments::maybe_floats(const char* name, const py::object& array, const Shape& shape) {
  if (array.is_none()) return {};
  if (!py::isinstance<py::array>(array)) refuse(name, "an array or None", text_of(py::type::of(array)));
  return floats(name, array, shape);
}

Heads OpArguments::heads(const char* name, const py::array& array, const Shape& shape) {
  check(name, array, {py::dtype::of<float>()}, shape);
  const int64_t n = array.shape(0);
  const bool flat = array.ndim() == 2;
  const Heads heads = heads_out(n, flat ? 1 : array.shape(1), array.shape(flat ? 1 : 2));
  const float* from = static_cast<const float*>(array.data());
  for (int64_t i = 0; i < n * heads.heads; ++i)
    std::copy_n(from + i * heads.dim, heads.dim,
                values<float>(heads.view) + i / heads.heads * heads.row_stride + i % heads.heads * heads.head_stride);
  return heads;
}

Heads OpArguments::heads_out(int64_t n, int64_t heads, int64_t dim) {
  Heads out;
  out.heads = heads;
  out.dim = dim;
  out.head_stride = dim + head_gap;
  out.row_stride = heads * out.head_stride + row_gap;
  out.view = allocate(n * out.row_stride * 4);
  std::fill_n(values<uint32_t>(out.view), n * out.row_stride, gap_bits);
  return out;
}

py::array_t<float> OpArguments::numbers(const Heads& heads, int64_t n, bool flat) {
  py::array_t<float> array(flat ? Shape{n, heads.dim} : Shape{n, heads.heads, heads.dim});
  float* to = array.mutable_data();
  for (int64_t row = 0; row < n; ++row) {
    const float* at = values<float>(heads.view) + row * heads.row_stride;
    for (int64_t i = 0; i < heads.row_stride; ++i) {
      const bool number = i % heads.head_stride < heads.dim && i / heads.head_stride < heads.heads;
      if (number)
        *to++ = at[i];
      else if (std::bit_cast<uint32_t>(at[i]) != gap_bits)
        throw StateError(concat("[", op_, "] wrote outside its output, in row ", row, " at ", i));
    }
  }
  return array;
}

void OpArguments::check_rows(const char* name, const py::array& array, const Shape& shape) const {
  Shape stored = shape;
  const bool codes = array.dtype().equal(py::dtype::of<int8_t>());
  if (codes && stored.back() >= 0) stored.back() += scale_bytes;
  check(name, array, {py::dtype::of<float>(), py::dtype::of<uint16_t>(), py::dtype::of<int8_t>()}, stored);
  if (!codes) return;
  const int64_t last = array.shape(array.ndim() - 1);
  require(last > scale_bytes, name, "codes and the 2 bytes of their scale", last);
}

std::vector<Cache> OpArguments::in_blocks(const std::vector<py::array>& arrays, int64_t unit) {
  const int64_t rows = arrays.front().shape(0);
  const int64_t count = (rows * unit + block_rows - 1) / block_rows;
  std::vector<Cache> caches;
  int64_t bytes = 0;
  for (const py::array& array : arrays) {
    Cache& cache = caches.emplace_back();
    cache.unit = unit;
    cache.offset = bytes + block_gap;
    cache.dtype = array.itemsize() == 4 ? DType::f32 : array.itemsize() == 2 ? DType::bf16 : DType::i8;
    const int64_t last = array.shape(array.ndim() - 1);
    cache.head = cache.dtype == DType::i8 ? last - scale_bytes : last;
    cache.width = rows && last ? array.size() / rows / last * cache.head : 0;
    bytes = cache.offset + cache.block_bytes();
  }
  const View even = allocate((count + 1) / 2 * bytes);
  const View odd = allocate(count / 2 * bytes);
  std::vector<View>& blocks = blocks_.emplace_back();
  for (int64_t i = 0; i < count; ++i) blocks.push_back((i % 2 ? odd : even).at((count - 1 - i) / 2 * bytes, 1));
  for (size_t i = 0; i < arrays.size(); ++i) {
    caches[i].blocks = blocks;
    each_row(caches[i], rows, [&](std::byte* row, int64_t at, size_t size) {
      std::memcpy(row, static_cast<const std::byte*>(arrays[i].data()) + at, size);
    });
  }
  return caches;
}

py::array OpArguments::rows_of(const Cache& cache, const py::array& like) const {
  py::array rows(like.dtype(), std::vector<py::ssize_t>(like.shape(), like.shape() + like.ndim()));
  each_row(cache, like.shape(0), [&](const std::byte* row, int64_t at, size_t size) {
    std::memcpy(static_cast<std::byte*>(rows.mutable_data()) + at, row, size);
  });
  return rows;
}

template <typename Visit>
void OpArguments::each_row(const Cache& cache, int64_t rows, const Visit& visit) const {
  if (cache.width == 0) return;
  const int64_t heads = cache.dtype == DType::i8 ? cache.scales() : 1;
  const int64_t size = cache.row_bytes() / heads;
  const int64_t stored = cache.dtype == DType::i8 ? size + scale_bytes : size;
  for (int64_t row = 0; row < rows; ++row) {
    std::byte* block = values<std::byte>(cache.blocks[static_cast<size_t>(row / cache.rows())]);
    const int64_t in_block = row % cache.rows();
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t at = (row * heads + head) * stored;
      visit(block + cache.offset + (in_block * heads + head) * size, at, static_cast<size_t>(size));
      if (stored > size)
        visit(block + cache.scales_offset() + (head * cache.rows() + in_block) * scale_bytes, at + size,
              static_cast<size_t>(scale_bytes));
    }
  }
}

Matrix OpArguments::matrix(const char* name, const py::handle& stored) {
  for (const char* part : {"format", "weight", "scales", "biases"})
    if (!py::hasattr(stored, part)) refuse(name, concat("an object with ", part), text_of(py::type::of(stored)));
  const py::object format = stored.attr("format");
  if (!py::isinstance<QuantFormat>(format)) refuse(name, "a QuantFormat as format", text_of(py::type::of(format)));
  Matrix matrix;
  matrix.format = format.cast<QuantFormat>();
  const auto types = [](DType type) -> std::vector<py::dtype> {
    if (type == DType::f32) return {py::dtype::of<float>()};
    if (dtype_bytes(type) == 1) return {py::dtype::of<uint8_t>()};
    if (type == DType::f16) return {py::dtype("float16"), py::dtype::of<uint16_t>()};
    return {type == DType::bf16 ? py::dtype::of<uint16_t>() : py::dtype::of<uint32_t>()};
  };
  const auto part = [&](const char* attribute, DType type, const Shape& shape) {
    const std::string full = concat(name, ".", attribute);
    const py::object object = stored.attr(attribute);
    if (!py::isinstance<py::array>(object)) refuse(full.c_str(), "an array", text_of(py::type::of(object)));
    const py::array array = object;
    check(full.c_str(), array, types(type), shape);
    return array;
  };
  const py::array weight = part("weight", matrix.format.element, {-1, -1});
  matrix.rows = weight.shape(0);
  matrix.columns = matrix.format.columns_of(weight.shape(1));
  if (!matrix.format.fits(matrix.columns) ||
      matrix.format.weight_row_bytes(matrix.columns) != weight.shape(1) * weight.itemsize())
    refuse(name, concat("rows of whole groups of ", matrix.format.describe()), text_of(weight.attr("shape")));
  matrix.weight = copy(weight);
  if (!matrix.format.has_scales()) return matrix;
  const int64_t scales = matrix.format.scale_row_bytes(matrix.columns);
  const Shape groups = {matrix.rows, scales / static_cast<int64_t>(dtype_bytes(matrix.format.scale_type))};
  matrix.scales = copy(part("scales", matrix.format.scale_type, groups));
  if (matrix.format.is_affine()) matrix.biases = copy(part("biases", matrix.format.scale_type, groups));
  return matrix;
}

std::vector<ExpertMatrices> OpArguments::in_slots(const char* name, std::vector<ExpertMatrices> experts) {
  const auto rounded = [](int64_t bytes) { return (bytes + 15) / 16 * 16; };
  const auto parts_of = [](ExpertMatrices& expert) {
    std::vector<View*> parts;
    for (Matrix* matrix : {&expert.gate, &expert.up, &expert.down})
      for (View* part : {&matrix->weight, &matrix->scales, &matrix->biases})
        if (*part) parts.push_back(part);
    return parts;
  };
  int64_t total = 0;
  std::vector<int64_t> first;
  for (ExpertMatrices& expert : experts) {
    std::vector<int64_t> sizes;
    for (const View* part : parts_of(expert)) sizes.push_back(rounded(part->buffer->bytes()));
    if (first.empty()) first = sizes;
    if (sizes != first && backend_.name() != "cpu")
      refuse(name, concat("experts of one shape and format on ", backend_.name()), "others");
    total += std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  }
  const View room = allocate(total);
  int64_t at = 0;
  for (ExpertMatrices& expert : experts)
    for (View* part : parts_of(expert)) {
      const int64_t size = part->buffer->bytes();
      std::memcpy(values<std::byte>(room) + at, values<std::byte>(*part), static_cast<size_t>(size));
      *part = room.at(at, 1);
      at += rounded(size);
    }
  return experts;
}

View OpArguments::output(int64_t elements) { return allocate(elements * 4); }

py::array_t<float> OpArguments::floats_of(const View& view, const Shape& shape) const {
  return array_of(values<float>(view), shape);
}

py::array_t<int32_t> OpArguments::ints_of(const View& view, const Shape& shape) const {
  return array_of(values<int32_t>(view), shape);
}

}  // namespace moeflux::python
