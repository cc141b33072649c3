// Residual streams that are mixed by gates, and the gate of an n-gram embedding. A row of streams is [streams, width].
#include "basics.h"

extern "C" __global__ void silu_of(const FactorParams params) {
  begin_kernel();
  const u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < params.count) params.x[i] = silu(params.x[i] * params.factor);
}

// A block for each stream of each row: of x, by the weights y.
extern "C" __global__ void hyper_norm(const StreamParams params) {
  __shared__ float scratch[row_threads / lanes];
  begin_kernel();
  const float* x = params.x + u64(blockIdx.x) * params.width;
  float* out = params.out + u64(blockIdx.x) * params.width;
  const float* weight = params.y + u64(blockIdx.x % params.streams) * params.width;
  const float factor = norm_factor(x, params.width, params.eps, scratch);
  for (u32 i = threadIdx.x; i < params.width; i += row_threads) out[i] = normed(x[i], factor, weight[i]);
}

// The mean over the streams of x * sigmoid(y). A thread has a number of the output.
extern "C" __global__ void hyper_mix(const StreamParams params) {
  begin_kernel();
  const u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= u64(params.n) * params.width) return;
  const u64 row = i / params.width, column = i % params.width;
  float sum = 0.0f;
  for (u32 j = 0; j < params.streams; j++) {
    const u64 place = (row * params.streams + j) * params.width + column;
    sum = fmaf(params.x[place], sigmoid(params.y[place]), sum);
  }
  params.out[i] = sum * (1.0f / float(params.streams));
}

// out += x * 2 sigmoid(y / streams), each stream with its gate.
extern "C" __global__ void hyper_add(const StreamParams params) {
  begin_kernel();
  const u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= u64(params.n) * params.streams * params.width) return;
  const u64 stream = i / params.width, column = i % params.width;
  const float factor = sigmoid(params.y[stream] / float(params.streams)) * 2.0f;
  params.out[i] = fmaf(factor, params.x[stream / params.streams * params.width + column], params.out[i]);
}

// A warp for each stream of each row: the key x meets the query y, and gates the value z.
extern "C" __global__ void ngram_gate(const StreamParams params) {
  begin_kernel();
  const u64 stream = u64(blockIdx.x) * head_warps + warp_of();
  if (stream >= u64(params.n) * params.streams) return;
  const float* key = params.x + stream * params.width;
  const float* query = params.y + stream * params.width;
  const float* value = params.z + stream / params.streams * params.width;
  float products = 0.0f;
  for (u32 i = lane_of(); i < params.width; i += lanes) products = fmaf(key[i], query[i], products);
  const float score = warp_sum(products) / sqrtf(float(params.width));
  const float size = fabsf(score);
  const float root = sqrtf(size < 1e-6f ? 1e-6f : size);  // NaN stays NaN
  const float gate = sigmoid(score == 0.0f ? 0.0f : score < 0.0f ? -root : root);
  for (u32 i = lane_of(); i < params.width; i += lanes) params.out[stream * params.width + i] = gate * value[i];
}
