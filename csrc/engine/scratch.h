// Where the intermediate numbers of a call lie. The scratch is made once for the largest chunk. All sessions of an
// engine share it, because they take turns, and all layers do, because they follow each other. n is the number of rows
// of the call. Numbers are f32 unless a comment says otherwise.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "backend/mirror.h"
#include "models/rope.h"
#include "models/variant.h"

namespace moeflux {

// Cosines and sines of a call's positions, for the layers that turn alike.
struct Angles {
  Rope rope;
  int64_t unit = 1;                 // of the first position of each unit of so many that the rows of a piece complete
  std::vector<double> frequencies;  // radians a position
  double magnitude = 1;
  Mirrored numbers;  // [n, rope.dim / 2, 2]
};

// A buffer for each kind of memory, or one for all; null where nothing was asked for.
using ScratchMemory = std::array<std::unique_ptr<Buffer>, 3>;

// The one description of the scratch: who asks for which room, how much it is and where it lies. Those who ask by one
// name share it, one after the other.
class ScratchLayout {
 public:
  // `rows`: the largest chunk; `context`: positions of the longest session.
  ScratchLayout(int64_t rows, int64_t context) : rows_(rows), context_(context) {}

  int64_t rows() const { return rows_; }
  int64_t context() const { return context_; }
  // When there is memory, `view` learns where its numbers lie. Until then the view itself must stay where it is.
  void place(View& view, std::string_view name, int64_t elements, Memory memory = Memory::device);
  // For the host too.
  void place(Mirrored& numbers, std::string_view name, int64_t elements);
  void place_angles(View& view, const Rope& rope, int64_t unit = 1);

  // Of memory, where host and device share it or do not.
  int64_t bytes(bool shared) const;
  int64_t device_bytes() const;  // the part of it that is in a device's own memory
  ScratchMemory allocate(Backend& backend);
  // Of all that were asked for, when there is memory.
  std::vector<Angles> angles() const;

 private:
  struct Area {
    std::string name;
    int64_t elements = 0;  // the most that anybody asked for
    Memory memory = Memory::device;
    bool is_mirrored = false;
    std::vector<View*> views;
    std::vector<Mirrored*> mirrors;
    Mirrored at;
  };

  Area& area(std::string_view name, int64_t elements);
  std::array<int64_t, 3> sizes(bool shared) const;  // by kind of memory

  int64_t rows_;
  int64_t context_;
  std::vector<Area> areas_;
  struct Turn {
    Rope rope;
    int64_t unit = 1;
    std::string area;
  };
  std::vector<Turn> turns_;
};

// The room that belongs to no block.
struct Scratch {
  int64_t rows = 0;  // the largest chunk

  View tokens;         // i32 [n, streams]; host-visible
  View hidden;         // [n, streams, hidden]: the residual stream, or several side by side
  Mirrored exchanged;  // the same for the host too, where rows come from another stage or go to one
  View normed;         // [n, hidden]: what a layer's half is applied to
  View out;            // [n, hidden]: what it yields

  // Logits of several rows at a time, where all are asked for.
  int64_t logit_rows = 0;
  Mirrored logits;  // [logit_rows, vocab]

  std::vector<Angles> angles;
  std::vector<Product> products;  // on the host: of a layer that has one a head, kept to be reused

  ScratchMemory memory;

  void place(ScratchLayout& layout, const Variant& variant);
};

}  // namespace moeflux
