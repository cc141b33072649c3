// Softmax attention over cached rows: grouped-query attention, and latent attention in its absorbed form.
//
// A unit of work is a block of queries (rows, and query heads that share a key head). When there are few blocks, long
// contexts are cut into spans, so that several threads can share one head. A unit then leaves its maximum, its sum and
// its weighted values in the scratch, and a merge adds the spans in order. The result of a row depends only on the rows
// that it sees, not on how the work was cut, nor on the rows beside it in the task.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeflux::cpu {

constexpr int64_t cached_block = 256;

enum class Rows { f32, bf16, codes };

struct AttentionTask {
  const float* q = nullptr;  // row i, head j at q + i * q_row_stride + j * q_head_stride: `dim` numbers
  int64_t q_row_stride = 0;
  int64_t q_head_stride = 0;
  const float* q_pe = nullptr;  // `pe_dim` numbers; only when pe_dim > 0
  int64_t q_pe_row_stride = 0;
  int64_t q_pe_head_stride = 0;

  // Cached rows lie in blocks of cached_block. Of each kind those of a block stand together, so many bytes behind its
  // first: keys and values [kv_heads, dim], f32, bf16 or codes of 8 bits. Latent attention: the latents, both times,
  // and kv_heads = 1. Behind the codes of a block are their scales, bf16 [kv_heads, cached_block].
  const std::byte* const* blocks = nullptr;
  int64_t k_offset = 0;
  int64_t v_offset = 0;
  int64_t pe_offset = 0;  // [pe_dim], shared by every head; adds q_pe . k_pe to each score
  Rows kind = Rows::f32;

  const float* sinks = nullptr;  // [heads] or null: a score that each head has besides, without a value

  int64_t rows = 0;    // row i attends to cache rows 0 ... first_position + i
  int64_t window = 0;  // and to no more than the last so many of them; 0: to all
  int64_t heads = 0;   // a multiple of kv_heads; consecutive ones share a key head
  int64_t kv_heads = 0;
  int64_t dim = 0;
  int64_t pe_dim = 0;
  int64_t first_position = 0;
  float scale = 0;

  float* out = nullptr;      // [rows, heads, dim]
  float* scratch = nullptr;  // AttentionKernels::scratch numbers; left alone when that is 0
};

// No task asks for more than this many numbers of scratch, whatever its rows and context.
[[gnu::always_inline]] constexpr int64_t attention_scratch_bound(int64_t dim) { return 8192 * (dim + 2); }

// Whether AMX takes a task (see attention_tiles.inl): it needs rows of bf16 of whole steps, and enough heads for a
// tile. A window leaves few rows, and tiles would compute scores on both sides of it in vain.
constexpr int64_t tile_step = 32;
constexpr int64_t max_tiled_dim = 512;
constexpr int64_t max_tiled_channels = max_tiled_dim + 64;
constexpr int64_t least_tiled_heads = 3;  // that share a key head

[[gnu::always_inline]] constexpr bool fits_tiles(const AttentionTask& task) {
  return task.kind == Rows::bf16 && task.window == 0 && task.dim % tile_step == 0 && task.dim <= max_tiled_dim &&
         task.pe_dim % tile_step == 0 && task.dim + task.pe_dim <= max_tiled_channels &&
         task.heads >= least_tiled_heads * task.kv_heads;
}

// Whether VNNI takes a task (see attention_codes.inl): it needs rows of codes of whole steps, and sums that fit in 32
// bits.
constexpr int64_t coded_step = 32;
constexpr int64_t max_coded_dim = 512;
constexpr int64_t max_coded_channels = max_coded_dim + 64;

[[gnu::always_inline]] constexpr bool fits_codes(const AttentionTask& task) {
  return task.kind == Rows::codes && task.dim % coded_step == 0 && task.dim <= max_coded_dim &&
         task.pe_dim % coded_step == 0 && task.dim + task.pe_dim <= max_coded_channels;
}

struct AttentionKernels {
  int64_t (*scratch)(const AttentionTask& task);  // numbers
  int64_t (*units)(const AttentionTask& task);
  void (*run)(const AttentionTask& task, int64_t unit);
  int64_t (*merge_units)(const AttentionTask& task);       // 0 when nothing was cut into spans
  void (*merge)(const AttentionTask& task, int64_t unit);  // after every unit has run
};

}  // namespace moeflux::cpu
