// Runs every NEON kernel and the portable one on the same seeded numbers, in one program, and says where they disagree.
//
// Freestanding but for the C library: no C++ library has to be built for the target. The portable kernels are compiled
// without NEON, so their multiply-adds round twice where NEON's round once; `near` allows for that.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/kernels.h"
#include "matrices.h"
#include "neon_checks.h"

namespace moeflux::cpu {

extern const Kernels neon_kernels;
extern const Kernels portable_kernels;

namespace {

const Kernels* const both[2] = {&portable_kernels, &neon_kernels};

// ---- Matrices ------------------------------------------------------------------------------------------------------

constexpr int64_t matrix_rows = 37;

void check_products(const Weights& weights, int64_t rows, int64_t n) {
  const int64_t columns = weights.columns;
  const float* x[max_block];
  const float* tall[max_block];
  for (int64_t i = 0; i < n; ++i) x[i] = numbers(columns), tall[i] = numbers(rows);
  float* products[2];
  float* transposed[2];
  float* row[2];
  for (int side = 0; side < 2; ++side) {
    const MatmulKernels& kernels = both[side]->matmul;
    products[side] = room<float>(n * rows);
    transposed[side] = room<float>(n * columns);
    row[side] = room<float>(columns);
    float* out[max_block];
    for (int64_t i = 0; i < n; ++i) out[i] = products[side] + i * rows;
    kernels.multiply(weights, 0, rows, x, out, n);
    for (int64_t i = 0; i < n; ++i) out[i] = transposed[side] + i * columns;
    kernels.multiply_transposed(weights, rows, 0, columns, tall, out, n);
    kernels.dequantize(weights, 5, row[side]);
  }
  near("multiply", {products[0], products[1]}, n * rows);
  near("multiply_transposed", {transposed[0], transposed[1]}, n * columns);
  near("dequantize", {row[0], row[1]}, columns, 1e-6);
}

// Numbers of a row must be the same to the last bit.
void check_numbers(const Weights& weights, int64_t rows, int64_t n) {
  check_products(weights, rows, n);
  float* row[2] = {room<float>(weights.columns), room<float>(weights.columns)};
  for (int side = 0; side < 2; ++side) both[side]->matmul.dequantize(weights, 5, row[side]);
  equal("dequantize", {row[0], row[1]}, weights.columns);
}

void check_matrices() {
  for (int64_t n : {1, 2, 5, 33}) {
    for (DType type : {DType::bf16, DType::f16, DType::f32}) {
      for (int bits : {2, 3, 4, 5, 6, 8})
        for (int64_t group : {32, 64, 128})
          check_products(matrix_of(bits, group, type, matrix_rows, 384), matrix_rows, n);
      check_products(matrix_of(0, 0, type, matrix_rows, 100), matrix_rows, n);
    }
    for (const Weights& format : float_formats) check_numbers(matrix_of(format, matrix_rows, 384), matrix_rows, n);
    for (const BlockShape& shape : block_shapes) check_numbers(matrix_of(shape, matrix_rows, 3), matrix_rows, n);
  }
}

// ---- Elementwise ---------------------------------------------------------------------------------------------------

void check_elementwise(int64_t width) {
  const float* x = numbers(width, 8);
  const float* y = numbers(width, 8);
  const float* weight = numbers(width);
  const float* outputs = numbers(3 * width);
  const float* shares = numbers(3);
  const float* angles = numbers(width);
  float* found[13][2];
  uint16_t* narrow[2];
  int8_t* codes[2];
  uint16_t scales[2];
  for (int side = 0; side < 2; ++side) {
    const ElementwiseKernels& kernels = both[side]->elementwise;
    for (auto& each : found) each[side] = copy(x, width);
    narrow[side] = room<uint16_t>(width);
    kernels.rms_norm(x, weight, found[0][side], width, 1e-6f, 0.5f);
    kernels.gated_rms_norm(found[1][side], y, weight, width, 1e-6f);
    kernels.swiglu(x, y, found[2][side], width);
    kernels.sigmoid_gate(found[3][side], y, width);
    kernels.residual_add(x, y, found[4][side], width);
    kernels.combine(x, outputs, shares, 3, width, y, weight, found[5][side], 0, width);
    kernels.rope(found[6][side], angles, width / 4, false);
    kernels.rope(found[7][side], angles, width / 4, true);
    kernels.clamped_swiglu(x, y, found[8][side], width, 1.7f, 3.0f);
    kernels.geglu(x, y, found[9][side], width);
    kernels.scale(found[10][side], 0.3f, width);
    kernels.soft_cap(found[11][side], 2.0f, width);
    kernels.layer_norm(found[12][side], weight, y, width, 1e-6f);
    kernels.to_bf16(x, narrow[side], width);
    codes[side] = room<int8_t>(width);
    scales[side] = kernels.to_codes(x, codes[side], width);
  }
  const char* names[] = {"rms_norm", "gated_rms_norm", "swiglu", "sigmoid_gate", "residual_add", "combine",   "rope",
                         "rope",     "clamped_swiglu", "geglu",  "scale",        "soft_cap",     "layer_norm"};
  for (int i = 0; i < 13; ++i) near(names[i], {found[i][0], found[i][1]}, width);
  equal("to_bf16", {narrow[0], narrow[1]}, width);
  equal("to_codes", {codes[0], codes[1]}, width);
  equal("the scale of codes", {&scales[0], &scales[1]}, 1);
}

// ---- Attention -----------------------------------------------------------------------------------------------------

void check_attention(int64_t rows, int64_t first, int64_t heads, int64_t kv_heads, int64_t dim, int64_t pe_dim,
                     Rows kind, int64_t window = 0) {
  const int64_t count = (first + rows + cached_block - 1) / cached_block;
  const int64_t keys = cached_block * kv_heads * dim;
  const int64_t pe_keys = cached_block * pe_dim;
  const int64_t element = kind == Rows::f32 ? 4 : kind == Rows::bf16 ? 2 : 1;
  const int64_t scales = kind == Rows::codes ? kv_heads * cached_block * 2 : 0;  // bytes
  AttentionTask task;
  task.q = numbers(rows * heads * dim);
  task.q_row_stride = heads * dim;
  task.q_head_stride = dim;
  task.q_pe = numbers(rows * heads * pe_dim);
  task.q_pe_row_stride = heads * pe_dim;
  task.q_pe_head_stride = pe_dim;
  const std::byte** blocks = room<const std::byte*>(count);
  for (int64_t i = 0; i < count; ++i) {
    // Where there are codes, everything is pairs of them or a scale.
    const int64_t count_of_pairs = (2 * (keys + scales) + pe_keys) / 2 + cached_block;
    const void* block = kind == Rows::f32    ? static_cast<void*>(numbers(2 * keys + pe_keys))
                        : kind == Rows::bf16 ? bf16_numbers(2 * keys + pe_keys)
                                             : bf16_numbers(count_of_pairs);
    blocks[i] = static_cast<const std::byte*>(block);
  }
  task.blocks = blocks;
  task.k_offset = 0;
  task.v_offset = keys * element + scales;
  task.pe_offset = 2 * task.v_offset;
  task.kind = kind;
  task.sinks = window > 0 ? numbers(heads) : nullptr;
  task.window = window;
  task.rows = rows;
  task.heads = heads;
  task.kv_heads = kv_heads;
  task.dim = dim;
  task.pe_dim = pe_dim;
  task.first_position = first;
  task.scale = kind == Rows::codes ? 0.3f / 127 : 0.3f;
  float* out[2];
  for (int side = 0; side < 2; ++side) {
    const AttentionKernels& kernels = both[side]->attention;
    task.out = out[side] = room<float>(rows * heads * dim);
    task.scratch = room<float>(kernels.scratch(task));
    for (int64_t unit = 0; unit < kernels.units(task); ++unit) kernels.run(task, unit);
    for (int64_t unit = 0; unit < kernels.merge_units(task); ++unit) kernels.merge(task, unit);
  }
  near("attention", {out[0], out[1]}, rows * heads * dim);
}

// Scores of an index, and the best of them.
void check_selection(int64_t rows, int64_t first, int64_t heads, int64_t dim, int64_t unit, Rows kind) {
  const int64_t keys = cached_block / unit;
  const int64_t count = (first + rows + cached_block - 1) / cached_block;
  IndexTask task;
  task.q = numbers(rows * heads * dim);
  task.q_row_stride = heads * dim;
  task.q_head_stride = dim;
  task.weights = numbers(rows * heads);
  const std::byte** blocks = room<const std::byte*>(count);
  for (int64_t i = 0; i < count; ++i)
    blocks[i] = kind == Rows::f32 ? reinterpret_cast<const std::byte*>(numbers(keys * dim))
                                  : reinterpret_cast<const std::byte*>(bf16_numbers(keys * dim + keys));
  task.blocks = blocks;
  task.block_keys = keys;
  task.kind = kind;
  task.rows = rows;
  task.heads = heads;
  task.dim = dim;
  task.first_position = first;
  task.unit = unit;
  task.scale = kind == Rows::codes ? 0.3f / 127 : 0.3f;
  task.stride = (first + rows) / unit;
  float* scores[2];
  int32_t* ids[2];
  const int64_t chosen = task.stride / 3;
  for (int side = 0; side < 2; ++side) {
    const SelectionKernels& kernels = both[side]->selection;
    task.scores = scores[side] = room<float>(rows * task.stride);
    for (int64_t work = 0; work < kernels.score_units(task); ++work) kernels.score(task, work);
    ids[side] = room<int32_t>(chosen);
    kernels.select(scores[0] + (rows - 1) * task.stride, task.stride, chosen, ids[side]);
  }
  near("index_scores", {scores[0], scores[1]}, rows * task.stride);
  equal("index_select", {ids[0], ids[1]}, chosen);
}

// ---- Residual streams -----------------------------------------------------------------------------------------------

void check_streams(int64_t streams, int64_t width) {
  const float* x = numbers(streams * width);
  const float* gates = numbers(streams * width);
  const float* value = numbers(width);
  float* found[4][2];
  for (int side = 0; side < 2; ++side) {
    const HyperKernels& kernels = both[side]->hyper;
    for (auto& each : found) each[side] = copy(x, width);
    kernels.silu(found[0][side], 0.3f, width);
    kernels.hyper_mix(x, gates, found[1][side], streams, width, 0, width);
    kernels.hyper_add(found[2][side], value, 0.7f, width);
    kernels.ngram_gate(x, gates, value, found[3][side], width);
  }
  const char* names[] = {"silu", "hyper_mix", "hyper_add", "ngram_gate"};
  for (int i = 0; i < 4; ++i) near(names[i], {found[i][0], found[i][1]}, width);
}

// ---- Delta net -----------------------------------------------------------------------------------------------------

void check_conv1d(int64_t rows, int64_t channels, int64_t taps, int64_t dilation = 1) {
  const float* before = numbers((taps - 1) * dilation * channels);
  ConvTask task;
  task.dilation = dilation;
  task.x = numbers(rows * channels);
  task.weight = numbers(channels * taps);
  task.rows = rows;
  task.channels = channels;
  task.taps = taps;
  float* out[2];
  float* state[2];
  for (int side = 0; side < 2; ++side) {
    const DeltaKernels& kernels = both[side]->delta;
    task.out = out[side] = room<float>(rows * channels);
    task.state = state[side] = copy(before, task.kept() * channels);
    for (int64_t unit = 0; unit < kernels.conv1d_units(task); ++unit) kernels.conv1d(task, unit);
  }
  near("conv1d", {out[0], out[1]}, rows * channels);
  equal("conv1d's state", {state[0], state[1]}, task.kept() * channels);
}

void check_delta_gates(int64_t rows, int64_t heads) {
  DeltaGatesTask task;
  task.alpha = numbers(rows * heads, 40);
  task.b = numbers(rows * heads, 40);
  task.a_log = numbers(heads, 3);
  task.dt_bias = numbers(heads);
  task.rows = rows;
  task.heads = heads;
  float* decay[2];
  float* beta[2];
  for (int side = 0; side < 2; ++side) {
    const DeltaKernels& kernels = both[side]->delta;
    task.decay = decay[side] = room<float>(rows * heads);
    task.beta = beta[side] = room<float>(rows * heads);
    for (int64_t unit = 0; unit < kernels.delta_gates_units(task); ++unit) kernels.delta_gates(task, unit);
  }
  near("delta_gates", {decay[0], decay[1]}, rows * heads);
  near("delta_gates", {beta[0], beta[1]}, rows * heads);
}

void check_gated_delta(int64_t rows, int64_t key_dim, int64_t value_dim) {
  const int64_t key_heads = 2, value_heads = 4;
  const int64_t state_size = value_heads * value_dim * key_dim;
  const float* before = numbers(state_size);
  DeltaTask task;
  task.q = numbers(rows * key_heads * key_dim, 0.1f);
  task.k = numbers(rows * key_heads * key_dim, 0.1f);
  task.v = numbers(rows * value_heads * value_dim);
  task.q_row_stride = task.k_row_stride = key_heads * key_dim;
  task.q_head_stride = task.k_head_stride = key_dim;
  task.v_row_stride = value_heads * value_dim;
  task.v_head_stride = value_dim;
  float* decay = numbers(rows * value_heads);
  float* beta = numbers(rows * value_heads);
  for (int64_t i = 0; i < rows * value_heads; ++i) decay[i] = fabsf(decay[i]), beta[i] = fabsf(beta[i]);
  task.decay = decay;
  task.beta = beta;
  task.rows = rows;
  task.key_heads = key_heads;
  task.value_heads = value_heads;
  task.key_dim = key_dim;
  task.value_dim = value_dim;
  float* out[2];
  float* state[2];
  for (int side = 0; side < 2; ++side) {
    const DeltaKernels& kernels = both[side]->delta;
    task.out = out[side] = room<float>(rows * value_heads * value_dim);
    task.state = state[side] = copy(before, state_size);
    for (int64_t unit = 0; unit < kernels.gated_delta_units(task); ++unit) kernels.gated_delta(task, unit);
  }
  near("gated_delta", {out[0], out[1]}, rows * value_heads * value_dim);
  near("gated_delta's state", {state[0], state[1]}, state_size);
}

// ---- Choosing ------------------------------------------------------------------------------------------------------

void check_routers(int64_t experts, int64_t k, int64_t groups, int64_t groups_kept) {
  RouteTask task;
  task.rows = 5;
  task.logits = numbers(task.rows * experts, 4);
  task.bias = numbers(experts);
  task.experts = experts;
  task.k = k;
  task.groups_kept = groups_kept;
  task.scaling = 2.5f;
  const char* names[] = {"route_softmax", "route_softmax among groups", "route_grouped"};
  for (int kind = 0; kind < 3; ++kind) {
    int32_t* ids[2];
    float* weights[2];
    task.groups = kind == 0 ? 0 : groups;
    for (int side = 0; side < 2; ++side) {
      task.ids = ids[side] = room<int32_t>(task.rows * k);
      task.weights = weights[side] = room<float>(task.rows * k);
      const RouteKernels& kernels = both[side]->route;
      for (int64_t row = 0; row < task.rows; ++row)
        (kind == 2 ? kernels.route_grouped : kernels.route_softmax)(task, row);
    }
    equal(names[kind], {ids[0], ids[1]}, task.rows * k);
    near(names[kind], {weights[0], weights[1]}, task.rows * k);
  }
}

void check_top_k(int64_t count, int64_t k, bool with_nan) {
  float* logits = numbers(count);
  for (int64_t i = 0; with_nan && i < count; i += 3) logits[i] = NAN;
  TopKTask task;
  task.logits = logits;
  task.count = count;
  task.k = k;
  int32_t* ids[2];
  float* values[2];
  for (int side = 0; side < 2; ++side) {
    const RouteKernels& kernels = both[side]->route;
    task.ids = ids[side] = room<int32_t>(k);
    task.values = values[side] = room<float>(k);
    task.scratch = room<Candidate>(kernels.top_k_scratch(task));
    for (int64_t unit = 0; unit < kernels.top_k_units(task); ++unit) kernels.top_k(task, unit);
    kernels.top_k_merge(task);
  }
  equal("top_k's ids", {ids[0], ids[1]}, k);
  equal("top_k's values", {values[0], values[1]}, k);
}

void check_all() {
  check_matrices();
  for (int64_t width : {4, 36, 100, 256}) check_elementwise(width);
  for (const Rows kind : {Rows::f32, Rows::bf16, Rows::codes}) {
    for (int64_t rows : {1, 3, 17}) {
      check_attention(rows, 70, 6, 2, 40, 0, kind);
      check_attention(rows, 1, 16, 2, 128, 0, kind);
      check_attention(rows, 9, 5, 1, 64, 12, kind);
      check_attention(rows, 600, 6, 2, 40, 0, kind, 130);
    }
    check_attention(2, 1500, 4, 2, 36, 0, kind);
    check_selection(3, 500, 9, 40, 1, kind);
    check_selection(2, 700, 3, 64, 4, kind);
  }
  for (int64_t rows : {1, 2, 9}) {
    for (int64_t taps : {2, 4, 5}) check_conv1d(rows, 303, taps);
    check_conv1d(rows, 303, 4, 3);
  }
  for (int64_t width : {4, 36, 100}) check_streams(4, width);
  check_delta_gates(9, 33);
  for (int64_t rows : {1, 9}) {
    check_gated_delta(rows, 128, 128);
    check_gated_delta(rows, 36, 21);
  }
  check_routers(256, 8, 8, 4);
  check_routers(6, 3, 6, 3);
  for (bool with_nan : {false, true}) {
    check_top_k(7, 7, with_nan);
    check_top_k(40'001, 100, with_nan);
  }
}

}  // namespace
}  // namespace moeflux::cpu

int main() {
  moeflux::cpu::check_all();
  printf("%d checks, %d failures\n", moeflux::cpu::checks, moeflux::cpu::failures);
  return moeflux::cpu::failures ? 1 : 0;
}
