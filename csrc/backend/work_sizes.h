// How large the work of a backend may be.
#pragma once

#include <cstdint>

namespace moeflux {

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
};

}  // namespace moeflux
