#include "engine/weights.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/arena.h"
#include "core/error.h"
#include "core/file.h"
#include "core/half.h"
#include "core/rounding.h"

namespace moeflux {
namespace {

constexpr int64_t tensor_alignment = 64;     // in the arena: a cache line
constexpr int64_t piece = int64_t{1} << 26;  // bytes of one read, after which somebody may be told, or may stop it

int64_t stored_bytes(const StoredTensor& tensor) {
  int64_t total = 0;
  for (const Span& span : tensor.spans) total += span.bytes;
  return total;
}

// Kernels take vectors in f32, as the model means them.
bool is_widened(const StoredTensor& tensor) {
  return is_vector(tensor.kind) && (tensor.dtype != DType::f32 || tensor.negated_exp);
}

// The tensors that are loaded: rows of a table stay in their file.
template <typename Visit>
void each_loaded(const StoreDirectory& store, const Visit& visit) {
  for (const auto& [name, tensor] : store.tensors)
    if (tensor.kind != TensorKind::table) visit(name, tensor);
}

// A vector that is widened lands as a whole, anything else piece by piece.
int64_t largest_landing(const StoreDirectory& store) {
  int64_t largest = 0;
  each_loaded(store, [&](const std::string&, const StoredTensor& tensor) {
    largest = std::max(largest, is_widened(tensor) ? tensor.elements() * 4 : std::min(piece, stored_bytes(tensor)));
  });
  return largest;
}

// A tensor as it is stored, at a place where a kernel may load it.
bool stays_in_place(const StoredTensor& tensor) {
  return tensor.spans.size() == 1 && tensor.spans.front().offset % tensor_alignment == 0 && !is_widened(tensor);
}

float stored_number(DType dtype, const std::byte* at) {
  if (dtype == DType::f32) {
    float number;
    std::memcpy(&number, at, sizeof number);
    return number;
  }
  uint16_t half;
  std::memcpy(&half, at, sizeof half);
  return dtype == DType::bf16 ? bf16_to_f32(half) : f16_to_f32(half);
}

// Widens in place, so that loading needs no memory besides the arena. The stored numbers lie at the end of the room for
// `count` f32, and every tensor.step-th of them is wanted. Each is read before a number is written over it.
void widen(const StoredTensor& tensor, std::byte* room, int64_t count) {
  const int64_t step = tensor.step * static_cast<int64_t>(dtype_bytes(tensor.dtype));
  const std::byte* stored = room + static_cast<int64_t>(sizeof(float)) * count - stored_bytes(tensor);
  for (int64_t i = 0; i < count; ++i) {
    float number = stored_number(tensor.dtype, stored + step * i) + tensor.added;
    if (tensor.negated_exp) number = static_cast<float>(std::log(-static_cast<double>(number)));
    std::memcpy(room + 4 * i, &number, sizeof number);
  }
}

}  // namespace

// ---- WeightLoader ---------------------------------------------------------------------------------------------------

WeightLoader::WeightLoader(const StoreDirectory& store, Backend& backend, const Progress& progress)
    : store_(store), progress_(progress), layout_(dense_layout(store, true)) {
  std::vector<File> files;
  for (const std::string& path : store.files) files.emplace_back(path);
  if (!map(files, backend)) layout_ = dense_layout(store, false);
  if (layout_.arena) weights_.arena = backend.allocate(layout_.arena, Memory::device, "dense weights");
  each_loaded(store, [&](const std::string& name, const StoredTensor& tensor) {
    if (place_of(name).map < 0) total_ += stored_bytes(tensor);
  });
  if (!weights_.arena) return;
  const DenseLanding landing(backend, *weights_.arena, store);
  each_loaded(store, [&](const std::string& name, const StoredTensor& tensor) {
    if (place_of(name).map < 0) load(files, name, tensor, landing);
  });
}

View WeightLoader::vector(const std::string& name) const {
  const DenseLayout::Place& place = place_of(name);
  return {(place.map < 0 ? weights_.arena : weights_.maps[static_cast<size_t>(place.map)]).get(), place.offset};
}

float WeightLoader::number(const std::string& name) const {
  const StoredTensor& tensor = store_.tensors.at(name);
  const Span& span = tensor.spans.front();
  std::array<std::byte, sizeof(float)> room = {};
  const size_t bytes = dtype_bytes(tensor.dtype);
  File(store_.files[static_cast<size_t>(span.file)]).read_exact(span.offset, {room.end() - bytes, bytes});
  if (is_widened(tensor)) widen(tensor, room.data(), 1);
  float number;
  std::memcpy(&number, room.data(), sizeof number);
  return number;
}

Matrix WeightLoader::matrix(const std::string& base) const {
  Matrix result;
  result.format = store_.formats.at(base);
  const StoredTensor& weight = store_.tensors.at(base + ".weight");
  const int64_t stored_columns = weight.shape.back();
  result.columns = result.format.columns_of(stored_columns);
  result.rows = weight.elements() / stored_columns;
  result.weight = vector(base + ".weight");
  if (result.format.has_scales()) result.scales = vector(base + ".scales");
  if (result.format.is_affine()) result.biases = vector(base + ".biases");
  return result;
}

// False if the device would rather have all of it in memory of its own.
bool WeightLoader::map(const std::vector<File>& files, Backend& backend) {
  for (const DenseLayout::Map& each : layout_.maps) {
    const File& file = files[static_cast<size_t>(each.file)];
    const int64_t bytes = std::min(each.bytes, file.bytes() - each.begin);  // the last page may be cut short
    weights_.maps.push_back(backend.map(file, each.begin, bytes, "dense weights"));
    if (!weights_.maps.back()) {
      weights_.maps.clear();
      return false;
    }
  }
  for (const DenseLayout::Map& each : layout_.maps)
    weights_.mapped.push_back(file_readers()(store_.files[static_cast<size_t>(each.file)], ReadMode::buffered));
  return true;
}

void WeightLoader::load(const std::vector<File>& files, const std::string& name, const StoredTensor& tensor,
                        const DenseLanding& landing) {
  const bool widened = is_widened(tensor);
  const int64_t begin = place_of(name).offset;
  int64_t offset = widened ? begin + 4 * tensor.elements() - stored_bytes(tensor) : begin;
  for (const Span& span : tensor.spans)
    for (int64_t done = 0; done < span.bytes; done += piece) {
      const int64_t bytes = std::min(piece, span.bytes - done);
      std::byte* const out = widened ? landing.begin(begin) + (offset - begin) : landing.begin(offset);
      files[static_cast<size_t>(span.file)].read_exact(span.offset + done, {out, static_cast<size_t>(bytes)});
      if (!widened) landing.end(offset, bytes);
      offset += bytes;
      tell(bytes);
    }
  if (!widened) return;
  widen(tensor, landing.begin(begin), tensor.elements());
  landing.end(begin, tensor.elements() * 4);
}

void WeightLoader::tell(int64_t bytes) {
  done_ += bytes;
  if (progress_ && !progress_(done_, total_))
    throw StateError(concat("load: stopped by its caller after ", done_, " of ", total_, " bytes"));
}

// ---- DenseLanding ---------------------------------------------------------------------------------------------------

DenseLanding::DenseLanding(Backend& backend, const Buffer& arena, const StoreDirectory& store)
    : backend_(backend), arena_(arena) {
  if (!backend.shares_memory()) room_ = backend.allocate(largest_landing(store), Memory::staging, "dense weights");
}

int64_t DenseLanding::planned_bytes(const StoreDirectory& store) { return arena_bytes(largest_landing(store)); }

void DenseLanding::end(int64_t offset, int64_t bytes) const {
  if (room_) backend_.copy({room_.get(), 0}, {&arena_, offset}, bytes).wait();
}

// ---- DenseLayout ----------------------------------------------------------------------------------------------------

// The part of each file that could be mapped, by file: from the first tensor that may stay where it is to the last.
static std::map<int64_t, DenseLayout::Map> maps_of(const StoreDirectory& store) {
  std::map<int64_t, DenseLayout::Map> maps;
  std::map<int64_t, int64_t> used;
  const int64_t page = arena_bytes(1);
  each_loaded(store, [&](const std::string&, const StoredTensor& tensor) {
    if (!stays_in_place(tensor)) return;
    const Span& span = tensor.spans.front();
    const int64_t begin = span.offset / page * page;
    const int64_t end = arena_bytes(span.offset + span.bytes);
    DenseLayout::Map& map = maps.try_emplace(span.file, DenseLayout::Map{span.file, begin, 0}).first->second;
    const int64_t last = std::max(map.begin + map.bytes, end);
    map.begin = std::min(map.begin, begin);
    map.bytes = last - map.begin;
    used[span.file] += span.bytes;
  });
  // Otherwise memory would be wasted on tensors that nobody needs there, such as experts.
  std::erase_if(maps, [&](const auto& each) { return used[each.first] < each.second.bytes / 16 * 15; });
  return maps;
}

DenseLayout dense_layout(const StoreDirectory& store, bool maps) {
  DenseLayout layout;
  std::map<int64_t, int64_t> by_file;
  if (maps)
    for (const auto& [file, map] : maps_of(store)) {
      by_file[file] = static_cast<int64_t>(layout.maps.size());
      layout.maps.push_back(map);
    }
  each_loaded(store, [&](const std::string& name, const StoredTensor& tensor) {
    if (stays_in_place(tensor)) {
      const Span& span = tensor.spans.front();
      if (const auto found = by_file.find(span.file); found != by_file.end()) {
        const DenseLayout::Map& map = layout.maps[static_cast<size_t>(found->second)];
        layout.places[name] = {found->second, span.offset - map.begin};
        return;
      }
    }
    layout.places[name] = {-1, layout.arena};
    const int64_t bytes = is_widened(tensor) ? tensor.elements() * 4 : stored_bytes(tensor);
    layout.arena = round_up(layout.arena + bytes, tensor_alignment);
  });
  return layout;
}

int64_t DenseLayout::bytes() const {
  return std::accumulate(maps.begin(), maps.end(), arena_bytes(arena),
                         [](int64_t sum, const Map& map) { return sum + map.bytes; });
}

// ---- DenseWeights ---------------------------------------------------------------------------------------------------

int64_t DenseWeights::bytes() const {
  return std::accumulate(maps.begin(), maps.end(), arena ? arena_bytes(arena->bytes()) : 0,
                         [](int64_t sum, const auto& map) { return sum + map->bytes(); });
}

void DenseWeights::check_unchanged() const {
  for (const std::unique_ptr<Reader>& file : mapped) file->check_unchanged();
}

}  // namespace moeflux
