// Sizes that kernels and host share, and the types of fixed width that both have.
#pragma once

#if defined(__CUDACC_RTC__)
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

namespace moeflux::cuda {

constexpr uint32_t lanes = 32;          // of a warp
constexpr uint32_t row_threads = 256;   // of a block that goes through one row
constexpr uint32_t norm_threads = 512;  // of one that makes a row, its norm and its digits
constexpr uint32_t flat_threads = 256;  // of a block where every thread has a number of its own
constexpr uint32_t head_warps = 4;      // of a block where every warp has a head of its own
constexpr uint32_t max_warps = 32;      // of any block

constexpr uint32_t pack = 8;            // codes that a lane takes at once: as many bytes as a code has bits
constexpr uint32_t step_columns = 32;   // of a tensor core's product: a pack of each of four lanes
constexpr uint32_t part_columns = 128;  // whose groups are added up before the parts are
constexpr uint32_t part_steps = part_columns / step_columns;
constexpr uint32_t tile_rows = 16;     // of a matrix, that a block takes together
constexpr uint32_t product_warps = 8;  // of a block at most: each takes every eighth part
constexpr uint32_t digits_of_number = 3;
constexpr uint32_t fragment_rows = 8;    // of x, whose digits lie together
constexpr uint32_t few_rows = 8;         // of x, that a block takes together if there are some
constexpr uint32_t many_rows = 32;       // and if there are many
constexpr uint32_t most_rows = 64;       // and if there are more
constexpr uint32_t many_stages = 3;      // parts of x that a block of many rows has room for
constexpr uint32_t few_warps = 8;        // of a block that takes few rows of x: each has a tile of its own
constexpr uint32_t few_slab_steps = 64;  // whose digits are in shared memory together
constexpr uint32_t few_step_bytes = few_rows * digits_of_number * step_columns;  // of digits
constexpr uint32_t many_warps = 4;     // of a block that takes many rows of x: each has a tile of its own
constexpr uint32_t slab_parts = 64;    // of one row of x, that are in shared memory together
constexpr uint32_t short_parts = 8;    // of one row of x in a batch, of which a warp takes all
constexpr uint32_t one_warps = 16;     // of a block that multiplies one row of x, at most
constexpr uint32_t most_outputs = 4;   // matrices that rows are multiplied with in one launch
constexpr uint32_t plain_outputs = 4;  // of a warp, in products of plain elements, and of codes that become f32
constexpr uint32_t one_outputs = 1;    // the same of codes, where x is one row
constexpr uint32_t plain_rows = 4;     // of x, that such a warp takes together if there are several
constexpr uint32_t plain_warps = 4;    // of a block

// What plain elements, scales and biases are.
constexpr uint32_t number_bf16 = 0;
constexpr uint32_t number_f16 = 1;
constexpr uint32_t number_f32 = 2;
constexpr uint32_t number_u8 = 3;            // the exponent of a power of two
constexpr uint32_t number_e4m3 = 4;          // a float of 8 bits
constexpr uint32_t number_e4m3_of_rows = 5;  // the same, and each row begins with an f32 that they are times

// In place of bits: codes of MXFP4, each a float of four bits. As bytes they are 0 to 24, twice the float and 12 more.
constexpr uint32_t e2m1 = 20;
constexpr uint32_t e2m1_zero = 12;
// Likewise codes of eight bits that are floats, and those of MXFP4 with scales that are floats.
constexpr uint32_t e4m3 = 21;
constexpr uint32_t nvfp4 = 22;

constexpr uint32_t attention_queries = 8;        // that a block takes through the keys together
constexpr uint32_t attention_threads = 256;      // of a block: a warp a query
constexpr uint32_t attention_tile_queries = 64;  // that a block takes together if there are many
constexpr uint32_t merge_threads = 128;          // of a block that adds up parts
constexpr uint32_t merge_numbers = 64;           // of the values, that it has of each
constexpr uint32_t merge_parts_together = 128;   // whose numbers it brings to shared memory at once
constexpr uint32_t attention_chunk = 32;         // cached rows whose weights are made together
constexpr uint32_t attention_span = 256;         // cached rows whose chunks are added up before the spans are
constexpr uint32_t span_chunks = attention_span / attention_chunk;
constexpr uint32_t cached_block = 256;  // cached rows that lie together: no span is in two blocks
constexpr uint32_t max_attention_dim = 512;
constexpr uint32_t index_heads = 4;                                   // that a warp takes through its keys together
constexpr uint32_t delta_lanes = 8;                                   // that have a row of the state together
constexpr uint32_t delta_warps = 4;                                   // of a block
constexpr uint32_t delta_values = delta_warps * lanes / delta_lanes;  // rows of the state of a block
constexpr uint32_t delta_tokens = 8;                                  // that a block brings together
constexpr uint32_t delta_key_dim = 128;                   // of keys that have a kernel of their own for many rows
constexpr uint32_t delta_many_values = 2 * delta_values;  // rows of the state of a block of that
constexpr uint32_t delta_stage = 16;                      // tokens that it brings together
constexpr uint32_t delta_delay = 3;                       // steps of which one writes a head's state
constexpr uint32_t step_threads = 4 * part_columns;       // of a block that has a head of the delta-net in a step
constexpr uint32_t max_key_dim = 256;                     // of the delta-net
constexpr uint32_t conv_rows = 8;                         // of a thread, where a convolution has many
constexpr uint32_t conv_taps = 4;                         // of one whose rows see each other's
constexpr uint32_t max_experts = 1024;                    // that a router chooses from
constexpr uint32_t few_experts = 256;                     // that fit in the registers of a warp
constexpr uint32_t group_warps = 16;                      // of the block that groups pairs by their experts
constexpr uint32_t top_k_block = 2048;                    // candidates of a block; k is at most half of it
constexpr uint32_t listed_block = 2048;                   // of a shortlist, as csrc/core/shortlist.h has it; so are
constexpr uint32_t listed_group = 32;                     // these
constexpr uint32_t most_listed = 2048;
constexpr uint32_t most_listed_groups = 1024;
constexpr uint32_t list_warps = 32;  // of the block that makes a list

constexpr uint32_t no_output = 0xffffffff;
constexpr uint32_t copied_warps = 16;  // of a block that multiplies one row of x with tiles in shared memory
constexpr uint32_t sum_warps = 18;     // of one that adds up experts, at most
constexpr uint32_t copied_parts = 2;   // of the columns, that such a warp has
constexpr uint32_t copied_places = 8;  // for tiles
constexpr uint32_t two_rows = 2;       // of x, that a warp takes through a tile of an expert together

// What a warp that goes through tiles by itself has of them in shared memory.
constexpr uint32_t streaming_warps = 8;                         // of a block
constexpr uint32_t stream_stages = 3;                           // one is multiplied while the others come
constexpr uint32_t stage_bytes = 2048;                          // of codes: a line of each row
constexpr uint32_t stage_scale_bytes = 512;                     // of the scales and biases of four parts
constexpr uint32_t stream_scale_bytes = 4 * stage_scale_bytes;  // a power of two, at least those of all stages
constexpr uint32_t stream_bytes = stream_stages * stage_bytes + stream_scale_bytes;
// And what there is of the digits of two rows, of each part of the columns, with their groups of 64 columns.
constexpr uint32_t entry_part_bytes = two_rows * (digits_of_number * part_columns + 2 * 8);

// Shared memory of a block of many rows: digits and groups of parts.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
__host__ __device__
#endif
    constexpr uint32_t many_bytes(uint32_t group_steps, uint32_t fragments) {
  const uint32_t of_digits = part_columns * digits_of_number, of_groups = part_steps / group_steps * 8;
  return many_stages * fragments * fragment_rows * (of_digits + of_groups);
}

// Shared memory of a block of attention that has a tile of queries: the queries, a chunk of keys and of values, sums;
// scores and weights; ten numbers of each query.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
__host__ __device__
#endif
    constexpr uint32_t attention_tile_bytes(uint32_t dim) {
  constexpr uint32_t queries = attention_tile_queries, keys = attention_chunk;
  return 4 * (dim * (2 * queries + 2 * keys) + keys * (queries + 4) + queries * (keys + 4) + 10 * queries);
}

// Shared memory of a block that has a chunk's keys, or its values, with the scales of codes; and how many of these it
// has room for, those of a chunk or of the chunks of a span, besides what every such block has.
constexpr uint32_t attention_row_own_bytes = 12 << 10;
constexpr uint32_t attention_row_queries = 4;   // that a block takes through a chunk; through a span it takes more
constexpr uint32_t attention_row_buffers = 2;   // of a chunk: its keys and its values
constexpr uint32_t attention_span_buffers = 3;  // of a span: one is filled while two are read
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
__host__ __device__
#endif
    constexpr uint32_t attention_buffer_bytes(uint32_t dim, uint32_t number_bytes) {
  return attention_chunk * (dim * number_bytes + 2);
}

// Attention of one row over latents: shared memory of a block, that has the queries of many heads and a chunk.
constexpr uint32_t latent_dim = 512;     // that there is a kernel for
constexpr uint32_t latent_pe_dim = 64;   // of the keys' positional parts
constexpr uint32_t latent_queries = 32;  // of a block
constexpr uint32_t latent_threads = 512;
constexpr uint32_t latent_own_bytes = 10 << 10;  // besides
constexpr uint32_t latent_query_bytes = latent_queries * (latent_dim + latent_pe_dim) * 4;
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
__host__ __device__
#endif
    constexpr uint32_t latent_bytes(uint32_t number_bytes) {
  return latent_query_bytes + attention_chunk * ((latent_dim + latent_pe_dim) * number_bytes + 4);
}

// Bytes of a tile in shared memory: sixteen rows of codes, and of their scales and biases.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
__host__ __device__
#endif
    constexpr uint32_t copied_tile_bytes(uint32_t row_bytes, uint32_t scale_bytes) {
  return tile_rows * (row_bytes + 2 * scale_bytes);
}

}  // namespace moeflux::cuda
