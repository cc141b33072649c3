// Which cached rows attention sees where an index selects them: what each unit of rows is worth, and the best of them.
//
// A score depends on its query and its key alone, and what is selected on the scores alone. So neither depends on how
// the work was divided, and the same scores give the same selection with every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attention.h"

namespace moeflux::cpu {

struct IndexTask {
  const float* q = nullptr;  // row i, head j at q + i * q_row_stride + j * q_head_stride: `dim` numbers
  int64_t q_row_stride = 0;
  int64_t q_head_stride = 0;
  const float* weights = nullptr;  // [rows, heads]; null: 1 for each

  // Key u is row u % block_keys of block u / block_keys: `dim` numbers, f32, bf16 or codes of 8 bits. Behind the codes
  // of a block are their scales, bf16 [block_keys].
  const std::byte* const* blocks = nullptr;
  int64_t keys_offset = 0;
  int64_t block_keys = cached_block;
  Rows kind = Rows::f32;

  int64_t rows = 0;
  int64_t heads = 0;
  int64_t dim = 0;
  int64_t first_position = 0;  // row i sees (first_position + i + 1) / unit keys
  int64_t unit = 1;
  float scale = 0;

  float* scores = nullptr;  // [rows, stride]
  int64_t stride = 0;
};

struct SelectionKernels {
  // A unit of work is a row at a block of keys.
  int64_t (*score_units)(const IndexTask& task);
  void (*score)(const IndexTask& task, int64_t work);
  // The `count` greatest of `seen` > count scores: where they are, in ascending order. Of equal ones the first are
  // taken, and NaN is less than any number.
  void (*select)(const float* scores, int64_t seen, int64_t count, int32_t* ids);
};

}  // namespace moeflux::cpu
