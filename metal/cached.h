// The rows that a session keeps, in blocks that lie in up to row_buffers buffers.
#pragma once

#include "common.h"

template <typename T>
struct Cached {
  device const RowBlock* blocks;
  device const T* first;
  device const T* second;
  device const T* third;
  device const T* fourth;
};

// The beginning of a block.
template <typename T>
inline device const T* block_of(const thread Cached<T>& cached, ulong index) {
  device const RowBlock& block = cached.blocks[index];
  const bool is_odd = block.buffer % 2 != 0;
  device const T* early = is_odd ? cached.second : cached.first;
  device const T* late = is_odd ? cached.fourth : cached.third;
  return (block.buffer > 1 ? late : early) + block.begin / sizeof(T);
}

// What the numbers of a head are multiplied by. Only codes have scales: behind those of a block's `rows` rows.
inline float scale_of(device const float*, uint, uint, uint, uint) { return 1.0f; }
inline float scale_of(device const bfloat*, uint, uint, uint, uint) { return 1.0f; }
inline float scale_of(device const char* codes, uint rows, uint width, uint head, uint row) {
  device const bfloat* scales = (device const bfloat*)(codes + ulong(rows) * width);
  return float(scales[head * rows + row]);
}
