// The weights that stay: everything but the routed experts. They are resolved to members of the blocks, so that no step
// looks up a name. They lie in one arena. If the device reads files in place, matrices stay in a file that holds hardly
// anything else.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "format/store_directory.h"
#include "io/reader.h"
#include "moeflux.h"

namespace moeflux {

struct DenseLayout {
  // A part of a file that is mapped: whole pages.
  struct Map {
    int64_t file = 0;
    int64_t begin = 0;
    int64_t bytes = 0;
  };
  // Where a tensor lies: in the arena (map -1) or in one of the maps.
  struct Place {
    int64_t map = -1;
    int64_t offset = 0;
  };

  std::map<std::string, Place> places;
  std::vector<Map> maps;
  int64_t arena = 0;

  int64_t bytes() const;  // of memory
};

// With `maps`, tensors are used in place if they fill nearly all of what would be mapped.
DenseLayout dense_layout(const StoreDirectory& store, bool maps);

// Where the host puts numbers for the arena: in the arena itself, or, if the device has memory of its own, in a room
// that is copied. Then several threads put them there, each with a room of its own: one reads while the bytes of
// another are on their way.
class DenseLanding {
 public:
  DenseLanding(Backend& backend, const Buffer& arena, const StoreDirectory& store);
  // Bytes of the rooms: each has those of the largest piece that is put at a time.
  static int64_t planned_bytes(const StoreDirectory& store);
  int threads() const;
  std::byte* begin(int thread, int64_t offset) const {
    return rooms_ ? rooms_->host() + thread * each_ : arena_.host() + offset;
  }
  void end(int thread, int64_t offset, int64_t bytes) const;

 private:
  Backend& backend_;
  const Buffer& arena_;
  int64_t each_;
  std::unique_ptr<Buffer> rooms_;
};

// The memory of the dense weights.
struct DenseWeights {
  std::unique_ptr<Buffer> arena;
  std::vector<std::unique_ptr<Buffer>> maps;
  std::vector<std::unique_ptr<Reader>> mapped;  // their files

  int64_t bytes() const;
  // IoError naming a file that is mapped and no longer what it was.
  void check_unchanged() const;
};

// Finds a place for every tensor of a store, and loads it there. Vectors are widened to f32; matrices stay as stored.
class WeightLoader {
 public:
  // `progress` is told after each piece. StateError when it says to stop.
  WeightLoader(const StoreDirectory& store, Backend& backend, const Progress& progress);

  View vector(const std::string& name) const;
  // The only number of a vector, read from its file.
  float number(const std::string& name) const;
  bool has_matrix(const std::string& base) const { return store_.formats.count(base) != 0; }
  // A stack [heads, rows, columns] becomes one matrix of heads * rows rows.
  Matrix matrix(const std::string& base) const;

  DenseWeights take() { return std::move(weights_); }

 private:
  const DenseLayout::Place& place_of(const std::string& name) const { return layout_.places.at(name); }
  bool map(const std::vector<File>& files, Backend& backend);
  // What is read at a time, and where it belongs in the arena: a part of a span, or all of a vector that is widened.
  struct Piece {
    const StoredTensor* tensor;
    Span span;
    int64_t offset;
  };
  std::vector<Piece> pieces() const;
  void load(const std::vector<File>& files, const Piece& piece, int thread, const DenseLanding& landing) const;
  void load_all(const std::vector<File>& files, const DenseLanding& landing) const;

  const StoreDirectory& store_;
  const Progress& progress_;
  DenseLayout layout_;
  DenseWeights weights_;
};

// The tensors of one layer, by their names within it.
class LayerTensors {
 public:
  LayerTensors(const WeightLoader& load, std::string prefix) : load_(load), prefix_(std::move(prefix)) {}

  View vector(const std::string& name) const { return load_.vector(prefix_ + name); }
  float number(const std::string& name) const { return load_.number(prefix_ + name); }
  bool has_matrix(const std::string& base) const { return load_.has_matrix(prefix_ + base); }
  Matrix matrix(const std::string& base) const { return load_.matrix(prefix_ + base); }

 private:
  const WeightLoader& load_;
  std::string prefix_;
};

}  // namespace moeflux
