// Rows of x as digits for products of some rows, and what makes these rows: a sum of experts, a norm, or the gated
// norms of heads. All of it with the bits of the ops by themselves.
#include "kept_digits.h"

DEV float4 four_at(const float* x, u64 at) { return *reinterpret_cast<const float4*>(x + at); }
DEV float4 sum_of_both(const float4& a, const float4& b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// Four numbers of the sum of a row's experts, as combine has them.
DEV float4 combined(const CombineParams& sum, u32 row, u32 i) {
  const u64 at = u64(row) * sum.hidden + i;
  const float* outputs = sum.outputs + u64(row) * sum.k * sum.hidden + i;
  const float4 residual = four_at(sum.residual, at);
  float4 routed = {}, shared = {};
  float by = 0.0f;
  if (sum.shared) {
    shared = four_at(sum.shared, at);
    by = sum.shared_gate ? sum.shared_gate[row] : 0.0f;
  }
#pragma unroll 8
  for (u32 j = 0; j < sum.k; j++) {
    const float weight = sum.weights[u64(row) * sum.k + j];
    const float4 output = four_at(outputs, u64(j) * sum.hidden);
    routed.x = fmaf(weight, output.x, routed.x), routed.y = fmaf(weight, output.y, routed.y);
    routed.z = fmaf(weight, output.z, routed.z), routed.w = fmaf(weight, output.w, routed.w);
  }
  float4 total = sum_of_both(residual, routed);
  if (sum.shared) {
    by = sum.shared_gate ? sigmoid(by) : 1.0f;
    total.x += shared.x * by, total.y += shared.y * by, total.z += shared.z * by, total.w += shared.w * by;
  }
  return total;
}

// Grid of blocks of norm_threads: rows. Dynamic memory: a row. A multiple of part_columns is the width.
DEV void make_norm_digits(const NormDigitsParams& params) {
  extern __shared__ float4 space[];
  __shared__ float scratch[row_threads / lanes];
  float* own = reinterpret_cast<float*>(space);
  let_next_come();
  const u32 row = blockIdx.x, packs = params.width / pack;
  const CombineParams& sum = params.sum;
  const u64 begin = u64(row) * params.width;
  float weights[pack];  // nobody writes those of a norm
  pack_of_x(params.weight, min(threadIdx.x, packs - 1) * pack, params.width, weights);
  wait_for_previous();
#pragma unroll 1
  for (u32 i = threadIdx.x * 4; i < params.width; i += norm_threads * 4) {
    float4 numbers = sum.outputs ? combined(sum, row, i) : four_at(params.x, begin + i);
    if (params.added) numbers = sum_of_both(numbers, four_at(params.added, begin + i));
    if (params.kept) *reinterpret_cast<float4*>(params.kept + begin + i) = numbers;
    space[i / 4] = numbers;
  }
  __syncthreads();
  const float factor = norm_factor(own, params.width, params.eps, scratch);
#pragma unroll 1
  for (u32 first = warp_of() * lanes; first < packs; first += norm_threads) {
    const u32 index = first + lane_of(), at = min(index, packs - 1) * pack;
    float numbers[pack];
    if (first >= norm_threads) pack_of_x(params.weight, at, params.width, weights);
#pragma unroll
    for (u32 i = 0; i < pack; i++) numbers[i] = normed(own[at + i], factor, weights[i]);
    DigitGroup group;
    const Digits made = digits_of(numbers, copied_steps, group);
    if (index >= packs) continue;
    float4* out = reinterpret_cast<float4*>(params.normed + begin + at);
    out[0] = make_float4(numbers[0], numbers[1], numbers[2], numbers[3]);
    out[1] = make_float4(numbers[4], numbers[5], numbers[6], numbers[7]);
    keep_digits(params.to, params.width, row, index, made, group);
  }
}

// SwiGLU in place. Grid of blocks of row_threads: packs of a row, rows.
DEV void make_gated_digits(const GatedDigitsParams& params) {
  begin_kernel();
  const u32 row = blockIdx.y, packs = params.width / pack, index = blockIdx.x * row_threads + threadIdx.x;
  if (index - lane_of() >= packs) return;  // other lanes behind the last pack read it before their warp writes
  const u64 at = u64(row) * params.width + min(index, packs - 1) * pack;
  float gate[pack], up[pack];
  pack_of_x(params.gate + at, 0, pack, gate);
  pack_of_x(params.up + at, 0, pack, up);
#pragma unroll
  for (u32 i = 0; i < pack; i++) gate[i] = silu(gate[i]) * up[i];
  DigitGroup group;
  const Digits made = digits_of(gate, copied_steps, group);
  if (index >= packs) return;
#pragma unroll
  for (u32 i = 0; i < pack; i++) params.gate[at + i] = gate[i];
  keep_digits(params.to, params.width, row, index, made, group);
}

// Heads of part_columns numbers, as gated_rms_norm has them, in place. Grid of blocks of head_warps: a warp each head.
DEV void make_heads_digits(const HeadsDigitsParams& all) {
  __shared__ float heads[head_warps][part_columns];
  let_next_come();
  const HeadParams& params = all.heads;
  const u32 i = blockIdx.x * head_warps + warp_of(), row = i / params.heads, head = i % params.heads, lane = lane_of();
  constexpr u32 each = part_columns / lanes;
  float *own = heads[warp_of()], *x = params.x + u64(row) * params.row_stride + head * params.head_stride;
  const float* gate = params.gate + u64(row) * params.gate_row_stride + head * params.gate_head_stride;
  float weights[each];
#pragma unroll
  for (u32 c = 0; c < each; c++) weights[c] = params.weight[lane + c * lanes];
  wait_for_previous();
  if (row >= params.n) return;
  float numbers[each], gates[each], squares = 0.0f;
#pragma unroll
  for (u32 c = 0; c < each; c++) numbers[c] = x[lane + c * lanes], gates[c] = gate[lane + c * lanes];
#pragma unroll
  for (u32 c = 0; c < each; c++) squares = fmaf(numbers[c], numbers[c], squares);
  const float factor = 1.0f / sqrtf(warp_sum(squares) / float(part_columns) + params.eps);
#pragma unroll
  for (u32 c = 0; c < each; c++)
    x[lane + c * lanes] = own[lane + c * lanes] = numbers[c] * factor * weights[c] * silu(gates[c]);
  __syncwarp();
  float of_pack[pack];
  constexpr u32 packs = part_columns / pack;
  const u32 index = lane % packs;
#pragma unroll
  for (u32 j = 0; j < pack; j++) of_pack[j] = own[index * pack + j];
  DigitGroup group;
  const Digits made = digits_of(of_pack, copied_steps, group);
  if (lane < packs) keep_digits(all.to, params.heads * part_columns, row, head * packs + index, made, group);
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

// Where nothing says that one block on a multiprocessor is enough, the compiler saves registers, and so an expert's
// outputs are loaded only when those before them have come.
KERNEL(norm_digits, NormDigitsParams, (norm_threads, 1), make_norm_digits)
KERNEL(gated_digits, GatedDigitsParams, (row_threads), make_gated_digits)
KERNEL(heads_digits, HeadsDigitsParams, (head_warps * lanes), make_heads_digits)
