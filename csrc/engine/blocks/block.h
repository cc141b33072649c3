// What the engine knows about the two halves of a layer, whatever they are. A block is made from its shape. It says
// what memory it needs, takes its weights, and from then on records its ops. Nobody else knows what kind it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "backend/backend.h"
#include "engine/piece.h"
#include "engine/scratch.h"
#include "engine/weights.h"
#include "moeflux.h"

namespace moeflux {

class ExpertSide;
class Recorder;

// The width of the residual stream, and the eps of the norms that read it. There may be several side by side, with
// gates of a rank.
struct Stream {
  int64_t width = 0;
  float eps = 0;
  int64_t count = 1;
  int64_t rank = 0;
};

class Block {
 public:
  virtual ~Block() = default;
  // Asks for its room in the scratch. It learns where the room is when there is memory.
  virtual void place(ScratchLayout& layout) = 0;
  // Raises `sizes` to the largest pieces of work that it will bring in chunks of so many rows.
  virtual void want(WorkSizes& sizes, int64_t rows) const = 0;
  virtual void load(const LayerTensors& tensors) = 0;
};

// The first half of a layer: what tokens take from those before them.
class MixerBlock : public Block {
 public:
  // scratch.out = mixer(scratch.normed). What each session keeps for this layer takes in its rows. The scratch has the
  // angles of the rows.
  virtual void record(Commands& commands, Scratch& scratch, size_t layer, const Rows& rows) const = 0;
  // Sessions keep what they would, and scratch.out is nobody's.
  virtual void keep(Commands& commands, Scratch& scratch, size_t layer, const Rows& rows) const {
    record(commands, scratch, layer, rows);
  }
};

// The second half: what is computed for each token by itself. It has its own norm, because the layer before may use it
// for a guess.
class FeedForwardBlock : public Block {
 public:
  // scratch.hidden += feed_forward(what it reads of it), n rows, after what was recorded before. If experts are read,
  // batches are submitted on the way.
  virtual void run(Recorder& recorder, ExpertSide& experts, Scratch& scratch, int64_t n, StepStats& stats) const = 0;
};

// ---- For those who record -------------------------------------------------------------------------------------------

// Heads that stand side by side with nothing between.
inline Heads dense_heads(View view, int64_t heads, int64_t dim) { return {view, heads, dim, heads * dim, dim}; }

// The same from a row on.
inline Heads from_row(Heads heads, int64_t row) {
  heads.view = heads.view.at(row * heads.row_stride);
  return heads;
}

// Rows without gaps.
inline Product project(View x, const Matrix& matrix, View out) { return {x, matrix.columns, matrix, out, matrix.rows}; }

}  // namespace moeflux
