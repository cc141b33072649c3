// Arguments and sizes that kernels and host share. Each kernel takes one struct, by value: sizes, and the addresses of
// what it reads and writes. An address of something that is not given is null.
//
// Widths are fixed, there are no bools, and 64-bit members come first: one layout everywhere. A stride counts elements.
#pragma once

#include "sizes.h"

namespace moeflux::cuda {

// ---- Vectors --------------------------------------------------------------------------------------------------------

struct FlatParams {
  float* x;
  const float* y;
  uint64_t count;
};

struct FactorParams {
  float* x;
  uint64_t count;
  float factor;
};

// With a limit it is clamped_swiglu.
struct SwigluParams {
  float* gate;
  const float* up;
  uint64_t count;
  float alpha;
  float limit;
  uint32_t is_geglu;
};

struct BiasParams {
  float* x;
  const float* bias;
  uint64_t count;
  uint32_t width;
};

struct NormParams {
  const float* x;
  const float* weight;
  float* out;
  uint32_t width;
  float eps;
};

struct LayerNormParams {
  float* x;
  const float* weight;
  const float* bias;
  uint32_t width;
  uint32_t n;
  float eps;
};

// Rows of residual streams: [streams, width]. Which of the addresses are given is the kernel's to say.
struct StreamParams {
  const float* x;
  const float* y;
  const float* z;
  float* out;
  uint32_t streams;
  uint32_t width;
  uint32_t n;
  float eps;  // of a norm
};

// Heads side by side in rows: head j of row i begins at i * row_stride + j * head_stride.
struct HeadParams {
  float* x;
  const float* weight;
  const float* gate;
  uint32_t row_stride;
  uint32_t head_stride;
  uint32_t gate_row_stride;
  uint32_t gate_head_stride;
  uint32_t dim;
  uint32_t heads;
  uint32_t n;
  float eps;
  float scale;
};

struct RopeParams {
  float* x;
  const float* angles;  // [n, half_dim, 2]: cosine, sine
  uint32_t row_stride;
  uint32_t head_stride;
  uint32_t half_dim;  // pairs
  uint32_t heads;
  uint32_t n;
  uint32_t interleaved;
};

// What a call sees of the rows that a session keeps. It lies in a list, so that arguments do not change from step to
// step: the addresses of the blocks are behind it.
struct CachedRows {
  uint64_t first;  // the cached row of the call's first row
  uint64_t count;  // of blocks
};

struct AppendParams {
  const float* x;
  const CachedRows* rows;
  const CachedRows* const* sessions;  // of each row, if each is of another one; else null
  uint64_t begin;                     // bytes of a block before its rows of this kind
  uint32_t x_stride;
  uint32_t width;
  uint32_t dim;  // of a head: numbers that share a scale; of codes only
  uint32_t n;
};

struct CombineParams {
  const float* residual;  // or null
  const float* outputs;
  const float* weights;
  const float* shared;
  const float* shared_gate;
  float* out;
  uint32_t hidden;
  uint32_t k;
  uint32_t n;
};

// Heads of queries and of keys in one row, or in one of each of some sessions: norms, rotations, and the row of keys
// and values that is kept.
struct HeadsRowParams {
  HeadParams q;
  HeadParams k;
  RopeParams rope;  // of both; x is not used
  AppendParams keys;
  AppendParams values;
};

// ---- Products -------------------------------------------------------------------------------------------------------

// A matrix as stored.
struct StoredMatrix {
  const uint8_t* codes;  // or plain elements
  const uint8_t* scales;
  const uint8_t* biases;
};

// What a group of x's integers is multiplied by, and their sum.
struct DigitGroup {
  float unit;
  float sum;
};

// Rows of x as digits: those of a product, or of the products of a batch, or of the pairs of blocks.
struct DigitsParams {
  const float* x;
  const struct ExpertBlock* blocks;  // each some fragments; null: the rows come one after the other
  const uint32_t* pairs;             // of the blocks
  uint8_t* digits;
  DigitGroup* groups;
  uint64_t x_batch;
  uint32_t x_stride;
  uint32_t columns;
  uint32_t group_steps;
  uint32_t n;                // rows of x
  uint32_t block_fragments;  // of an ExpertBlock
  uint32_t k;                // pairs that share a row of x
  uint32_t in_halves;        // whether all even columns of a step's digits are before the odd ones, for many rows
  uint32_t nothing;
};

// Another matrix of the same shape of x and format, that some rows are multiplied with in one launch.
struct MoreOutput {
  StoredMatrix matrix;
  float* out;
  uint32_t rows;
  uint32_t out_stride;
  uint32_t first_tile;  // at the end if there is none
  uint32_t nothing;
};

struct ProductParams {
  StoredMatrix matrix;
  MoreOutput more[most_outputs - 1];
  const float* x;
  const uint8_t* digits;  // of x, if there are several rows
  const DigitGroup* groups;
  float* out;
  uint64_t x_batch;  // elements from one product of a batch to the next
  uint64_t out_batch;
  uint32_t batch_rows;       // of the stack, likewise
  uint32_t batch_fragments;  // of the digits, likewise
  uint32_t rows;             // of the matrix
  uint32_t columns;
  uint32_t n;  // rows of x
  uint32_t x_stride;
  uint32_t out_stride;
  uint32_t group_steps;  // steps of a group of columns
  uint32_t number;       // one of number_...
  uint32_t tiles;        // of all matrices, if x has digits; outputs of a block, if x is a row without digits
};

// One row of x, and matrices of one format. Those behind the last have their first tile at the end. With it may go the
// norm that makes x, or those of its heads, and what comes of the outputs: a sum, SwiGLU of two, or the convolution of
// the first, which has four taps.
struct OneRowParams {
  StoredMatrix matrices[most_outputs];
  float* out[most_outputs];
  const float* x;       // before the norm, if there is one
  const float* weight;  // of the norm, or null
  float* normed;        // where the norm's output belongs
  const float* z;       // if x is heads, each a part of the columns: of their gated norm
  const float* heads;   // the weight of that
  float* residual;      // to which the output of the only matrix is added, or null
  const float* taps;    // [rows, 4]: weights of the convolution, or null
  float* tap_rows;      // [3, rows]: its state
  float* convolved;     // where its output belongs
  uint32_t rows[most_outputs];
  uint32_t first_tile[most_outputs];
  uint32_t tiles;
  uint32_t columns;
  uint32_t group_steps;
  uint32_t number;
  uint32_t gated;  // silu(this output) * the next takes the place of this one; or no_output
  float eps;       // of the norm
  // In shared memory, if tiles are there:
  uint32_t bits[most_outputs];
  uint32_t places;
  uint32_t together;    // tiles whose sums are made together
  uint32_t tile_parts;  // of the columns, that a tile has; 0: all
};

struct EmbedParams {
  StoredMatrix table;
  const int* ids;
  float* out;
  uint32_t columns;
  uint32_t group_steps;
  uint32_t number;
  uint32_t n;
};

// A matrix of every expert, in bytes from the expert's first.
struct ExpertMatrix {
  uint64_t codes;
  uint64_t scales;
  uint64_t biases;
};

// Pairs (token * k + place) that go through one expert: `count` entries of the list from `first` on.
struct ExpertBlock {
  const uint8_t* slot;
  uint32_t first;
  uint32_t count;
  uint32_t expert;
  uint32_t nothing;
};

struct ExpertParams {
  ExpertMatrix matrix;
  ExpertMatrix second;        // up, where the first is gate and both are taken together
  const uint8_t* slots;       // the buffer's first byte; with `ids`
  const uint64_t* slot_of;    // expert -> bytes; with `ids`
  const int* ids;             // pair -> expert, if a router on the device chose them
  const ExpertBlock* blocks;  // else
  const uint32_t* pairs;      // of the blocks
  const float* x;
  const uint8_t* digits;
  const DigitGroup* groups;
  const float* bias;         // [experts, rows] or null
  const float* second_bias;  // of the second matrix
  float* out;
  uint32_t rows;  // of each matrix
  uint32_t columns;
  uint32_t group_steps;
  uint32_t number;
  uint32_t k;  // pairs that share a row of x
  float alpha;
  float limit;  // of clamped_swiglu, or 0
  uint32_t is_geglu;
};

// ---- Attention ------------------------------------------------------------------------------------------------------

struct AttentionParams {
  const float* q;
  const float* q_pe;
  const CachedRows* rows;
  const CachedRows* const* sessions;  // of each row, if each is of another one, and n is 1; else null
  const float* sinks;                 // [heads], or null
  const float* gate;                  // by whose sigmoid the output is multiplied, or null
  float* out;
  float* parts;      // values [n * heads, part_count, dim], then the highest score and the weights' sum of each part
  uint64_t k_begin;  // bytes of a block before its keys
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
  uint32_t window;       // a row attends to no more than the last so many rows; 0: to all
  uint32_t part_count;   // that there is room for
  uint32_t part_chunks;  // 1, or those of a span
  float scale;
  uint32_t gate_row_stride;
  uint32_t gate_head_stride;
  uint32_t nothing;
};

// ---- Rows that an index selects -------------------------------------------------------------------------------------

struct IndexScoresParams {
  const float* q;
  const float* weights;  // [n, heads], or null
  const CachedRows* rows;
  float* scores;
  uint64_t keys_begin;  // bytes of a block before its keys
  uint64_t stride;      // of the scores
  uint32_t heads;
  uint32_t dim;
  uint32_t unit;
  uint32_t block_keys;
  uint32_t q_row_stride;
  uint32_t q_head_stride;
  float scale;
};

struct IndexSelectParams {
  const float* scores;
  int* ids;
  uint64_t first_position;
  uint64_t stride;
  uint32_t unit;
  uint32_t count;
};

struct GatherRowsParams {
  const int* ids;
  const CachedRows* from;
  const CachedRows* to;
  uint64_t from_begin;  // bytes of a block before its rows of this kind
  uint64_t to_begin;
  uint64_t skipped;  // rows that were not selected
  uint32_t rows;     // that are written
  uint32_t selected;
  uint32_t unit;
  uint32_t width;
  uint32_t heads;  // that have scales
};

// ---- Delta net ------------------------------------------------------------------------------------------------------

struct ConvParams {
  const float* x;
  float* state;
  float* const* sessions;  // the state of each row, if each is of another session, and n is 1; else null
  const float* weight;
  float* out;
  uint32_t n;
  uint32_t channels;
  uint32_t taps;
  uint32_t dilation;  // rows from one tap to the next
};

struct DeltaGatesParams {
  const float* alpha;
  const float* b;
  const float* a_log;
  const float* dt_bias;
  float* decay;
  float* beta;
  uint32_t heads;
  uint32_t count;  // n * heads
};

struct DeltaParams {
  const float* q;
  const float* k;
  const float* v;
  const float* decay;
  const float* beta;
  float* state;
  float* const* sessions;  // the state of each row, if each is of another session, and n is 1; else null
  float* out;
  DeltaGatesParams gates;  // of n rows, if decay and beta are not made yet; else alpha is null
  // Of one row without gates and norms of queries and keys: where q, k and v belong, which are elsewhere. Else null.
  float* q_kept;
  float* k_kept;
  float* v_kept;
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
  float q_eps;
  float k_eps;
  float q_scale;
  float k_scale;
  uint32_t has_room;  // behind the state, for PendingTokens
};

// ---- Choosing -------------------------------------------------------------------------------------------------------

struct RouteParams {
  const float* logits;
  const float* bias;
  const float* factors;  // of the experts, or null
  int* ids;
  float* weights;
  uint32_t experts;
  uint32_t k;
  uint32_t normalize;
  uint32_t groups;
  uint32_t groups_kept;
  float scaling;
};

// A router of one row, and gate and up of the experts that it chooses.
struct RoutedParams {
  RouteParams route;
  ExpertParams experts;
  uint64_t down_bytes;  // of an expert's last matrix, which is wanted next, from `down` on; a multiple of 16
  uint64_t down;
  uint32_t places;  // for tiles
  uint32_t together;
};

// Down of the experts and of the shared one, and the sum of all.
struct ExpertSumParams {
  ExpertParams experts;  // k: of the row
  StoredMatrix shared;   // codes are null where the shared expert's output is there already, or where there is none
  const float* shared_x;
  float* shared_out;
  CombineParams sum;
  uint32_t slot_count;  // of the table
  uint32_t nothing;
};

struct TopKParams {
  const float* values;
  const int* ids;  // null in the first round: a candidate's id is its place
  float* best_values;
  int* best_ids;
  uint32_t count;
  uint32_t k;
};

// Logits, or what blocks of them found.
struct SurveyParams {
  const float* values;
  const struct ShortlistRow* rows;  // if there are several; else null
  const uint64_t* found;            // of each row's blocks; null in the first round
  uint64_t* best;                   // likewise; in the last round null
  int* result;
  uint64_t count;
};

// A row of logits of which the greatest are listed.
struct ShortlistBlock {
  double sum;
  float greatest;
  uint32_t odd;
};
struct ShortlistRow {
  const float* logits;
  ShortlistBlock* blocks;
  int *head, *tokens;
  float *values, *groups;
  double factor;
};
struct ShortlistParams {
  const ShortlistRow* rows;
  uint32_t count;
  uint32_t blocks;
};

}  // namespace moeflux::cuda

#include "rows_params.h"
