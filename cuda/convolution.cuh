// The short convolution of the delta-net, and of n-gram tables.
#include "basics.h"

// Rows of the state.
DEV u32 kept_rows(const ConvParams& params) { return (params.taps - 1) * params.dilation; }
// Of the rows of the state, oldest first, and behind them those of the input.
DEV float tap(const ConvParams& params, u64 row, u32 channel) {
  const u32 kept = kept_rows(params);
  return row < kept ? params.state[row * params.channels + channel]
                    : params.x[(row - kept) * params.channels + channel];
}
DEV void convolve(const ConvParams& params, u32 row, u32 channel) {
  float sum = 0.0f;
  for (u32 i = 0; i < params.taps; i++)
    sum =
        fmaf(tap(params, row + u64(i) * params.dilation, channel), params.weight[u64(channel) * params.taps + i], sum);
  params.out[u64(row) * params.channels + channel] = silu(sum);
}
// The last rows of state and input become the state. Each row comes from a later one.
DEV void keep_last(const ConvParams& params, u32 channel) {
  for (u32 row = 0; row < kept_rows(params); row++)
    params.state[u64(row) * params.channels + channel] = tap(params, u64(row) + params.n, channel);
}

// A thread has a channel, in all rows of a session. Grid of threads: channels, 1, sessions.
DEV void convolve_few(const ConvParams& all) {
  begin_kernel();
  const u32 channel = blockIdx.x * blockDim.x + threadIdx.x;
  if (channel >= all.channels) return;
  ConvParams params = all;
  if (all.sessions) {
    params.state = all.sessions[blockIdx.z];
    params.x += u64(blockIdx.z) * all.channels;
    params.out += u64(blockIdx.z) * all.channels;
  }
  for (u32 row = 0; row < params.n; row++) convolve(params, row, channel);
  keep_last(params, channel);
}

// A thread has a channel, in conv_rows rows, and the state comes after. What several of them see is loaded once. Grid
// of threads: channels, blocks of rows.
DEV void convolve_many(const ConvParams& params) {
  begin_kernel();
  const u32 channel = blockIdx.x * blockDim.x + threadIdx.x, first = blockIdx.y * conv_rows;
  if (channel >= params.channels) return;
  const u32 count = min(conv_rows, params.n - first);
  if (params.taps != conv_taps || params.dilation != 1) {
    for (u32 row = 0; row < count; row++) convolve(params, first + row, channel);
    return;
  }
  float weights[conv_taps], seen[conv_rows + conv_taps - 1];
#pragma unroll
  for (u32 i = 0; i < conv_taps; i++) weights[i] = params.weight[u64(channel) * conv_taps + i];
#pragma unroll
  for (u32 i = 0; i < conv_rows + conv_taps - 1; i++)
    seen[i] = i < count + conv_taps - 1 ? tap(params, first + i, channel) : 0.0f;
#pragma unroll
  for (u32 row = 0; row < conv_rows; row++) {
    if (row >= count) break;
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < conv_taps; i++) sum = fmaf(seen[row + i], weights[i], sum);
    params.out[u64(first + row) * params.channels + channel] = silu(sum);
  }
}
DEV void keep_last_of_many(const ConvParams& params) {
  begin_kernel();
  const u32 channel = blockIdx.x * blockDim.x + threadIdx.x;
  if (channel < params.channels) keep_last(params, channel);
}

KERNEL(conv1d_few, ConvParams, (flat_threads), convolve_few)
KERNEL(conv1d, ConvParams, (flat_threads), convolve_many)
KERNEL(conv1d_state, ConvParams, (flat_threads), keep_last_of_many)
