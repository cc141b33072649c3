// What a store holds and where: the checked answer of opening one. Values only; no file stays open.
//
// Names are canonical whatever the store calls its tensors. A matrix X is X.weight alone, or X.weight, X.scales and
// X.biases. Every tensor that the variant needs is there with the right shape, none besides, and every span lies within
// its file.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/block_types.h"
#include "core/dtype.h"
#include "core/quant_format.h"
#include "core/sha256.h"
#include "format/expert_layout.h"
#include "models/tensor_list.h"
#include "models/variant.h"

namespace moeflux {

// A range of bytes of one file.
struct Span {
  int64_t file = 0;  // index into StoreDirectory::files
  int64_t offset = 0;
  int64_t bytes = 0;
  bool operator==(const Span&) const = default;
};

struct StoredTensor {
  DType dtype = DType::u8;
  std::vector<int64_t> shape;            // as stored: packed words for codes, bytes for blocks
  std::vector<Span> spans;               // in order; together the tensor, row-major
  TensorKind kind = TensorKind::matrix;  // the kind of the required tensor that it is, or is a part of
  float added = 0;  // to each number, once it is in f32: some norms are published as one less. Never to f32 or a matrix
  BlockType block = BlockType::none;  // of a matrix in GGUF's blocks, whose rows are bytes
  bool negated_exp = false;           // of a vector: what is stored is -exp(x). No number is added then
  int64_t step = 1;  // of the stored numbers, every so many are its own, from the first on. 2 at most, and never of f32
                     // or a matrix

  int64_t elements() const {
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    return count;
  }
};

using TensorTable = std::map<std::string, StoredTensor>;

struct FilePosition {
  int64_t file = 0;  // index into StoreDirectory::files
  int64_t offset = 0;
};

// Where a piece of a layer's experts lies: that of expert e begins at offset + e * stride. Where the rows of gate and
// up alternate, so do those of the piece and those of another matrix, and `row` are the bytes of one.
struct ExpertPlace {
  int64_t file = 0;
  int64_t offset = 0;
  int64_t stride = 0;
  int64_t row = 0;                      // 0: the piece is in one stretch
  std::vector<FilePosition> each = {};  // [expert], where each is a tensor of its own; the others say nothing then

  FilePosition of(int64_t expert) const {
    return each.empty() ? FilePosition{file, offset + expert * stride} : each[static_cast<size_t>(expert)];
  }
};

// [layer][expert]; a dense layer has none.
using ExpertChecksums = std::vector<std::vector<Sha256Sum>>;

struct StoreDirectory {
  Variant variant;
  std::string listing;                         // the file that lists the tensors: manifest, index or single shard
  std::vector<std::string> files;              // absolute paths
  TensorTable tensors;                         // everything but the routed experts
  std::map<std::string, QuantFormat> formats;  // of every matrix, by its base name
  ExpertLayout experts;                        // of a layer, one with the largest experts
  std::vector<ExpertLayout> layouts;           // [layer], where they differ in their formats; or empty
  std::vector<std::vector<ExpertPlace>> expert_places;  // [layer][piece]; empty for a dense layer
  ExpertChecksums expert_checksums;                     // empty where nobody needs them, or the store has none
  bool as_published = false;                            // of a checkpoint as Hugging Face lays it out
  std::vector<std::string> ignored;                     // tensors that are there and deliberately not used, as stored

  // Of a layer with experts. All layouts of a store have the same pieces, of other bytes.
  const ExpertLayout& experts_of(int64_t layer) const {
    return layouts.empty() ? experts : layouts[static_cast<size_t>(layer)];
  }

  // What the names of a layer's tensors begin with. They have the model's numbers, of a part of it, too.
  std::string prefix(int64_t layer) const;
  // In the order of experts.pieces, a span for each or one for each of its rows. std::out_of_range when the layer has
  // no such expert.
  std::vector<Span> expert_spans(int64_t layer, int64_t expert) const;
  // The formats that matrices and experts have, each once.
  std::vector<QuantFormat> every_format() const;
  // The files that hold experts, as indices into `files`, ascending.
  std::vector<int64_t> expert_files() const;
};

// The store becomes that of the same model without its layer that drafts.
void leave_draft_out(StoreDirectory& store);

// The store becomes that of some of its layers, `first` to the one before `last`, or to the end if that is 0. Unless
// these are all, the one that drafts is left out. The embedding stays with the model's first layer, and what follows
// the layers with the last one. ArgumentError when there are no such layers.
void keep_layers(StoreDirectory& store, int64_t first, int64_t last);

}  // namespace moeflux
