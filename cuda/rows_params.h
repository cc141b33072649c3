// Arguments of kernels for some rows together: those of a step of several sessions, or of a short prompt. Part of
// params.h, which includes it.
#pragma once

namespace moeflux::cuda {

// Rows of x, as digits by fragments, and matrices in groups of 64. Those behind the last have their first tile at
// the end. With it may go what comes of the outputs: a sum, or SwiGLU of two.
struct RowsParams {
  StoredMatrix matrices[most_outputs];
  float* out[most_outputs];
  const uint8_t* digits;
  const DigitGroup* groups;
  float* residual;  // to which the output of the only matrix is added, or null; it has the output's stride
  uint32_t rows[most_outputs];
  uint32_t out_stride[most_outputs];
  uint32_t first_tile[most_outputs];
  uint32_t bits[most_outputs];
  uint32_t tiles;
  uint32_t columns;
  uint32_t number;
  uint32_t n;      // rows of x
  uint32_t gated;  // silu(this output) * the next takes the place of this one; or no_output
  uint32_t places;
  uint32_t together;  // tiles whose sums are made together
  uint32_t nothing;
};

// Where the digits of rows in groups of 64 belong, which lie as in DigitsParams.
struct DigitRoom {
  uint8_t* digits;
  DigitGroup* groups;
  uint32_t in_halves;
  uint32_t nothing;
};

// What makes rows of x, besides their digits. First comes a sum of experts, unless its outputs are null, or one with
// rows that are added. Either is kept.
struct NormDigitsParams {
  CombineParams sum;
  DigitRoom to;
  const float* x;      // if there is no sum of experts
  const float* added;  // or null
  float* kept;         // or null
  const float* weight;
  float* normed;
  uint32_t width;
  float eps;
};
struct HeadsDigitsParams {
  HeadParams heads;
  DigitRoom to;
};
struct GatedDigitsParams {
  DigitRoom to;
  float* gate;
  const float* up;
  uint32_t width;
  uint32_t nothing;
};

// The merge of parts, and the digits of what comes of it, if these are wanted: merge_numbers are a group.
struct MergeParams {
  AttentionParams attention;
  DigitRoom to;
};

// A convolution of four taps of one row of each of some sessions, and what comes of it: norms of queries and of keys,
// which are the first heads and the next ones. And the gates.
struct DeltaInputsParams {
  ConvParams conv;
  DeltaGatesParams gates;
  uint32_t dim;  // of a head
  uint32_t key_heads;
  float q_eps;
  float k_eps;
  float q_scale;
  float k_scale;
};

// Of a head of the delta-net with keys and values of 128 numbers: tokens that the state does not have yet. A block may
// have delta_values rows of the state, so that each of these has a count of its own. Between kernels all are the same.
struct PendingTokens {
  struct {
    uint32_t count;
    uint32_t step;  // which of delta_delay: in one of them the state is written
  } of_rows[part_columns / delta_values];
  float decays[4];                                 // of delta_delay - 1; tokens are copied by sixteen bytes
  float tokens[delta_delay - 1][2][part_columns];  // key, after its norm, and what was to be corrected, by beta
};

// Takes them into the states of a session.
struct CompleteParams {
  float* state;
  uint32_t heads;
  uint32_t nothing;
};

// The delta-net of one row of each of some sessions, all of it between its products: what is above, the recurrence, the
// gated norms of its heads and their digits. Two value heads share a key head.
struct DeltaStepParams {
  DeltaInputsParams inputs;
  float* const* states;  // of the recurrence, one of each session
  HeadParams heads;
  DigitRoom to;
  uint32_t neighbours;  // as DeltaParams has it
  uint32_t has_room;    // behind states, for tokens that these do not have yet
};

// Pairs by their experts, as blocks: what a router on the device chose.
struct GroupParams {
  const int* ids;           // pair -> expert
  const uint8_t* slots;     // the buffer's first byte
  const uint64_t* slot_of;  // expert -> bytes
  ExpertBlock* blocks;      // those behind the last get no pair
  uint32_t* pairs;
  uint32_t count;  // of pairs
  uint32_t experts;
  uint32_t block_rows;   // pairs of a block at most
  uint32_t most_blocks;  // that there is room for
};

// Routers of some rows, and the pairs that they choose.
struct RouteRowsParams {
  RouteParams route;
  GroupParams group;
  uint32_t n;
  uint32_t nothing;
};

}  // namespace moeflux::cuda
