// How large the work of a backend may be.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/quant_format.h"

namespace moeflux {

struct MatrixShape {
  QuantFormat format;
  int64_t rows = 0;
  int64_t columns = 0;

  bool operator==(const MatrixShape&) const = default;
};

// The largest pieces of work that batches will bring. From them a backend knows what room of its own it needs.
struct WorkSizes {
  int64_t value_dim = 0;   // width of a value in attention: of one head, or the latent rank
  int64_t logits = 0;      // how many top_k chooses from
  int64_t picks = 0;       // how many it chooses
  int64_t heads = 0;       // heads of queries
  int64_t products = 0;    // products of one matmul, or jobs of one expert_ffn
  int64_t rows = 0;        // rows of one call
  int64_t pairs = 0;       // pairs of a row and an expert, in one layer
  int64_t pair_width = 0;  // numbers that an expert takes of a pair, or makes of it on the way
  int64_t row_blocks = 0;  // blocks of rows of one session
  int64_t batches = 3;     // batches there may be at once: in flight, and the one being recorded
  // The inputs of one matmul, or of one of the two stages of expert_ffn: how many rows there are in all the different
  // x, and how many numbers these rows have.
  int64_t input_rows = 0;
  int64_t inputs = 0;
  // Of the quantised matrices: the fewest columns that share a scale, and how many such numbers of columns there are.
  int64_t group = 32;
  int64_t group_sizes = 1;
  int64_t channels = 0;     // of a row that a convolution makes
  bool has_blocks = false;  // whether matrices are in GGUF's blocks

  // For a backend that makes the kernels of a model when it is loaded: what there is, each once.
  std::vector<MatrixShape> matrices;                // without experts
  std::vector<std::array<MatrixShape, 3>> experts;  // gate, up, down
  std::optional<QuantFormat> tokens;                // of the table of embeddings
  std::vector<int64_t> value_dims;                  // of attention
  int64_t key_dim = 0;                              // of the delta-net; 0 without one
  int64_t delta_head = 0;                           // width of one of its heads, whose norm goes with the product
  int64_t delta_columns = 0;                        // of all these heads
  bool by_head = false;                             // whether attention has products of each head
  bool selects = false;                             // whether an index selects the rows of attention
  bool has_streams = false;                         // whether there are several residual streams
};

// How many bytes a device wants behind the state of a delta-net [heads, rows, columns], for tokens that the state does
// not have yet. If all of these bytes are zero, there are no such tokens. Whoever copies the state copies them, too.
using DeltaRoom = int64_t (*)(int64_t heads, int64_t rows, int64_t columns);

}  // namespace moeflux
