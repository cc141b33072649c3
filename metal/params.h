// Arguments and sizes that shaders and host share. Each kernel has one struct, the first buffer that it takes.
//
// Widths are fixed, there are no bools and no vectors, and 64-bit fields come first. So the layout is the same
// everywhere. Counts are u32 to save registers, and places in large buffers are u64. A stride counts elements.
#pragma once

#if defined(__METAL_VERSION__)
#define MOEFLUX_SHARED constant constexpr
#else
#include <cstdint>
#define MOEFLUX_SHARED constexpr
#endif

// ---- Sizes ----------------------------------------------------------------------------------------------------------

MOEFLUX_SHARED uint32_t lanes = 32;           // of a simdgroup
MOEFLUX_SHARED uint32_t row_threads = 256;    // of a threadgroup that goes through one row
MOEFLUX_SHARED uint32_t max_simdgroups = 32;  // of any threadgroup
MOEFLUX_SHARED uint32_t flat_threads = 256;   // of a threadgroup where every thread has a number of its own
MOEFLUX_SHARED uint32_t pack = 8;             // codes that a lane takes at once: as many bytes as a code has bits
MOEFLUX_SHARED uint32_t outputs_of_simdgroup = 4;
MOEFLUX_SHARED uint32_t product_simdgroups = 2;  // of a threadgroup
MOEFLUX_SHARED uint32_t product_rows = 4;        // rows of x that a simdgroup takes at once if there are several
// What plain elements, scales and biases are.
MOEFLUX_SHARED uint32_t number_bf16 = 0;
MOEFLUX_SHARED uint32_t number_f16 = 1;
MOEFLUX_SHARED uint32_t number_f32 = 2;
MOEFLUX_SHARED uint32_t number_u8 = 3;            // exponents of powers of two
MOEFLUX_SHARED uint32_t number_e4m3 = 4;          // floats of 8 bits
MOEFLUX_SHARED uint32_t number_e4m3_of_rows = 5;  // the same, and each row begins with an f32 that they are times
// In place of bits: codes that are floats, of four bits and of eight.
MOEFLUX_SHARED uint32_t e2m1 = 20;
MOEFLUX_SHARED uint32_t e4m3 = 21;

MOEFLUX_SHARED uint32_t attention_queries = 4;  // that a simdgroup takes through the keys together
MOEFLUX_SHARED uint32_t attention_span = 256;   // cached rows after which sums begin anew
MOEFLUX_SHARED uint32_t cached_block = 256;     // cached rows that lie together: no span is in two blocks
MOEFLUX_SHARED uint32_t row_buffers = 4;        // in which the blocks of a session may lie
MOEFLUX_SHARED uint32_t index_heads = 4;        // that a simdgroup takes through its keys together
MOEFLUX_SHARED uint32_t delta_values = 4;       // rows of the state of a threadgroup, one a simdgroup
MOEFLUX_SHARED uint32_t max_key_dim = 256;      // of the delta-net
MOEFLUX_SHARED uint32_t max_attention_dim = 512;
MOEFLUX_SHARED uint32_t max_experts = 1024;  // that a router chooses from
MOEFLUX_SHARED uint32_t top_k_block = 2048;  // candidates of a threadgroup; k is at most half of it

// ---- Vectors --------------------------------------------------------------------------------------------------------

struct FlatParams {
  uint32_t count;
};

struct ClampedParams {
  uint32_t count;
  float alpha;
  float limit;
};

struct FactorParams {
  uint32_t count;
  float factor;
};

struct BiasParams {
  uint32_t width;
};

struct NormParams {
  uint32_t width;
  float eps;
};

// Rows of residual streams: [streams, width].
struct StreamParams {
  uint32_t streams;
  uint32_t width;
  float eps;  // of a norm
};

// Heads side by side in rows: head j of row i begins at i * row_stride + j * head_stride.
struct HeadNormParams {
  uint32_t row_stride;
  uint32_t head_stride;
  uint32_t gate_row_stride;
  uint32_t gate_head_stride;
  uint32_t dim;
  uint32_t has_weight;
  float eps;
  float scale;
};

struct HeadGateParams {
  uint32_t row_stride;
  uint32_t head_stride;
  uint32_t gate_row_stride;
  uint32_t gate_head_stride;
  uint32_t dim;
};

struct RopeParams {
  uint32_t row_stride;
  uint32_t head_stride;
  uint32_t half_dim;  // pairs
  uint32_t interleaved;
};

struct AppendParams {
  uint64_t first;  // row of the cache
  uint64_t begin;  // bytes of a block before its rows of this kind
  uint32_t x_stride;
  uint32_t width;
};

struct AppendCodesParams {
  uint64_t first;
  uint64_t begin;
  uint32_t x_stride;
  uint32_t width;
  uint32_t dim;  // of a head: numbers that share a scale
};

// A block of cached rows.
struct RowBlock {
  uint64_t begin;   // bytes
  uint32_t buffer;  // one of row_buffers
  uint32_t padding;
};

// Which rows an index selects.
struct IndexScoresParams {
  uint64_t first_position;
  uint64_t keys_begin;  // bytes of a block before its keys
  uint64_t stride;      // of the scores
  uint32_t heads;
  uint32_t dim;
  uint32_t unit;
  uint32_t block_keys;
  uint32_t q_row_stride;
  uint32_t q_head_stride;
  uint32_t has_weights;
  float scale;
};

struct IndexSelectParams {
  uint64_t first_position;
  uint64_t stride;
  uint32_t unit;
  uint32_t count;
};

struct GatherRowsParams {
  uint64_t from_begin;  // bytes of a block before its rows of this kind
  uint64_t to_begin;
  uint64_t skipped;  // rows that were not selected
  uint32_t first;    // of those that are written
  uint32_t selected;
  uint32_t unit;
  uint32_t width;
  uint32_t heads;  // that have scales
};

struct CombineParams {
  uint32_t hidden;
  uint32_t k;
  uint32_t has_residual;
  uint32_t has_shared;
  uint32_t has_gate;
};

// ---- Products -------------------------------------------------------------------------------------------------------

struct ProductParams {
  uint64_t x_batch;  // elements from one product of a batch to the next
  uint64_t out_batch;
  uint32_t batch_rows;  // of the stack, likewise
  uint32_t rows;        // of the matrix
  uint32_t columns;
  uint32_t n;  // rows of x
  uint32_t x_stride;
  uint32_t out_stride;
  uint32_t group_shift;  // log2 of the columns that share a scale
  uint32_t number;       // one of number_...
};

struct EmbedParams {
  uint32_t columns;
  uint32_t group_shift;
  uint32_t number;  // one of number_...
};

// The experts of a batch lie in slots of one buffer. The matrices of each lie at these bytes from the first byte of its
// slot.
struct ExpertParams {
  uint64_t weight;
  uint64_t scales;
  uint64_t biases;
  uint64_t up_weight;  // the second matrix of gate and up
  uint64_t up_scales;
  uint64_t up_biases;
  uint32_t rows;  // of each matrix
  uint32_t columns;
  uint32_t group_shift;
  uint32_t number;  // one of number_...
  uint32_t k;       // pairs that share a row of x
  uint32_t has_bias;
  float alpha;  // of clamped_swiglu
  float limit;  // 0: swiglu, or geglu
  uint32_t is_geglu;
};

// Up to product_rows pairs (token * k + place) that go through one expert: `count` entries of the list from `first` on.
struct ExpertBlock {
  uint64_t slot;  // bytes
  uint32_t first;
  uint32_t count;
  uint32_t expert;  // in its layer
  uint32_t padding;
};

struct ExpertBlocksParams {
  uint32_t count;  // pairs
};

// ---- Attention ------------------------------------------------------------------------------------------------------

struct AttentionParams {
  uint64_t first_position;  // row i of the call attends to cached rows 0 ... first_position + i
  uint64_t k_begin;         // bytes of a block before its keys
  uint64_t v_begin;
  uint64_t pe_begin;
  uint32_t n;
  uint32_t heads;
  uint32_t kv_heads;
  uint32_t dim;     // of a key, without its positional part
  uint32_t pe_dim;  // of the positional part that all heads share
  uint32_t q_row_stride;
  uint32_t q_head_stride;
  uint32_t q_pe_row_stride;
  uint32_t q_pe_head_stride;
  // If spans are side by side, these are the spans of one round.
  uint32_t first_span;
  uint32_t spans;
  uint32_t is_first;
  uint32_t is_last;
  uint32_t window;  // a row attends to no more than the last so many rows; 0: to all
  uint32_t has_sinks;
  float scale;
};

// For the older engine's kernels, each of which is one step for one query.
struct ScoresParams {
  uint32_t dim;
  uint32_t kv_dim;  // numbers of a cached row
  uint32_t length;  // cached rows
  uint32_t stride;  // of the scores of one head
  uint32_t heads_per_kv;
  float scale;
};

// ---- Delta net ------------------------------------------------------------------------------------------------------

struct ConvParams {
  uint32_t n;
  uint32_t channels;
  uint32_t taps;
  uint32_t dilation;  // rows from one tap to the next
};

struct DeltaGatesParams {
  uint32_t heads;
  uint32_t count;  // n * heads
};

struct DeltaParams {
  uint32_t n;
  uint32_t value_heads;
  uint32_t key_dim;
  uint32_t value_dim;
  uint32_t key_heads;
  uint32_t neighbours;  // value heads one after another that share a key head
  uint32_t q_row_stride;
  uint32_t q_head_stride;
  uint32_t k_row_stride;
  uint32_t k_head_stride;
  uint32_t v_row_stride;
  uint32_t v_head_stride;
};

// ---- Choosing -------------------------------------------------------------------------------------------------------

struct RouteParams {
  uint32_t experts;
  uint32_t k;
  uint32_t normalize;
  uint32_t groups;
  uint32_t groups_kept;
  uint32_t has_factors;
  float scaling;
};

struct TopKParams {
  uint32_t count;
  uint32_t k;
  uint32_t has_ids;
};
