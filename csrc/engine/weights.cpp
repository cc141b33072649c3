#include "engine/weights.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/arena.h"
#include "core/error.h"
#include "core/file.h"
#include "core/half.h"
#include "core/rounding.h"
#include "core/threads.h"

namespace moeflux {
namespace {

constexpr int64_t tensor_alignment = 64;           // in the arena: a cache line
constexpr int64_t piece_bytes = int64_t{1} << 23;  // of one read, after which somebody may be told, or may stop it
constexpr int landing_threads = 8;                 // that read for a device with memory of its own

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
    largest =
        std::max(largest, is_widened(tensor) ? tensor.elements() * 4 : std::min(piece_bytes, stored_bytes(tensor)));
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
  if (weights_.arena) load_all(files, DenseLanding(backend, *weights_.arena, store));
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

std::vector<WeightLoader::Piece> WeightLoader::pieces() const {
  std::vector<Piece> pieces;
  each_loaded(store_, [&](const std::string& name, const StoredTensor& tensor) {
    const DenseLayout::Place& place = place_of(name);
    if (place.map >= 0) return;
    if (is_widened(tensor)) return pieces.push_back({&tensor, {}, place.offset});
    int64_t offset = place.offset;
    for (const Span& span : tensor.spans)
      for (int64_t done = 0; done < span.bytes; done += piece_bytes) {
        const int64_t bytes = std::min(piece_bytes, span.bytes - done);
        pieces.push_back({&tensor, {span.file, span.offset + done, bytes}, offset});
        offset += bytes;
      }
  });
  return pieces;
}

void WeightLoader::load(const std::vector<File>& files, const Piece& piece, int thread,
                        const DenseLanding& landing) const {
  std::byte* const out = landing.begin(thread, piece.offset);
  const auto read = [&](const Span& span, std::byte* to) {
    files[static_cast<size_t>(span.file)].read_exact(span.offset, {to, static_cast<size_t>(span.bytes)});
  };
  const StoredTensor& tensor = *piece.tensor;
  if (!is_widened(tensor)) {
    read(piece.span, out);
    return landing.end(thread, piece.offset, piece.span.bytes);
  }
  const int64_t bytes = tensor.elements() * 4;
  std::byte* to = out + bytes - stored_bytes(tensor);
  for (const Span& span : tensor.spans) {
    read(span, to);
    to += span.bytes;
  }
  widen(tensor, out, tensor.elements());
  landing.end(thread, piece.offset, bytes);
}

// Only this thread tells how far all are.
void WeightLoader::load_all(const std::vector<File>& files, const DenseLanding& landing) const {
  const std::vector<Piece> all = pieces();
  const auto bytes_of = [](const Piece& piece) {
    return is_widened(*piece.tensor) ? stored_bytes(*piece.tensor) : piece.span.bytes;
  };
  int64_t total = 0;
  for (const Piece& piece : all) total += bytes_of(piece);
  std::atomic<size_t> next = 0;
  std::atomic<int64_t> done = 0;
  const auto tell = [&] {
    const int64_t now = done;
    if (progress_ && !progress_(now, total))
      throw StateError(concat("load: stopped by its caller after ", now, " of ", total, " bytes"));
  };
  const auto work = [&](int thread) {
    try {
      for (size_t at = next++; at < all.size(); at = next++) {
        load(files, all[at], thread, landing);
        done += bytes_of(all[at]);
        if (thread == 0) tell();
      }
    } catch (...) {
      next = all.size();  // nobody begins another one
      throw;
    }
  };
  Threads helpers("that load weights");
  for (int thread = 1; thread < landing.threads(); ++thread) helpers.start([&work, thread] { work(thread); });
  work(0);
  helpers.join();
  if (landing.threads() > 1) tell();
}

// ---- DenseLanding ---------------------------------------------------------------------------------------------------

DenseLanding::DenseLanding(Backend& backend, const Buffer& arena, const StoreDirectory& store)
    : backend_(backend), arena_(arena), each_(arena_bytes(largest_landing(store))) {
  if (!backend.shares_memory()) rooms_ = backend.allocate(planned_bytes(store), Memory::staging, "dense weights");
}

int64_t DenseLanding::planned_bytes(const StoreDirectory& store) {
  return landing_threads * arena_bytes(largest_landing(store));
}

int DenseLanding::threads() const { return rooms_ ? landing_threads : 1; }

void DenseLanding::end(int thread, int64_t offset, int64_t bytes) const {
  if (rooms_) backend_.copy({rooms_.get(), thread * each_}, {&arena_, offset}, bytes).wait();
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
