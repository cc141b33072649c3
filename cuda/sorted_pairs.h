// Pairs of a row and an expert by their experts, as every block of a kernel sorts them for itself.
#pragma once
#include "experts.h"

// An expert and one or two of its pairs.
struct ExpertEntry {
  const u8* slot;
  u32 expert;
  u32 count;
};
struct SortedPairs {
  ExpertEntry entries[few_experts];
  u8 pairs[few_experts][two_rows];  // of an entry
  u8 firsts[max_experts];           // entry of an expert's first pairs
  u32 of_warp[streaming_warps];     // entries
};
typedef u8 PairCounts[streaming_warps][max_experts];  // of each expert, that a warp has

// Before the kernel waits for the one before it. All threads, and then a barrier of the block.
DEV void prepare_sort(const ExpertParams& params, u32 experts, PairCounts& counts) {
  constexpr u32 line_slots = 128 / sizeof(u64);
  uint4* words = reinterpret_cast<uint4*>(counts);
  for (u32 i = threadIdx.x; i < sizeof(PairCounts) / sizeof(uint4); i += blockDim.x) words[i] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x * line_slots < experts) prefetch_line(params.slot_of + threadIdx.x * line_slots);
}

// Returns how many entries there are: one for each expert that some row chose, more for one that more than two did. A
// thread has a pair, which there are `pairs` of. An expert's are in their order, and experts in that of their first
// pairs. All threads.
DEV u32 sort_pairs(const ExpertParams& params, u32 pairs, PairCounts& counts, SortedPairs& sorted) {
  const u32 pair = threadIdx.x, warp = warp_of(), lane = lane_of();
  const bool is_there = pair < pairs;
  const u32 expert = is_there ? u32(params.ids[pair]) : max_experts;
  const u64 slot = is_there ? params.slot_of[expert] : 0;
  const u32 peers = warp_peers(expert), before = count_bits(peers & ((1u << lane) - 1));
  if (is_there && before == 0) counts[warp][expert] = u8(count_bits(peers));
  __syncthreads();
  u32 rank = before, total = 0;
  if (is_there) {
#pragma unroll
    for (u32 i = 0; i < streaming_warps; i++) {
      const u32 own = counts[i][expert];
      rank += i < warp ? own : 0;
      total += own;
    }
  }
  const u32 opened = is_there && rank == 0 ? (total + two_rows - 1) / two_rows : 0;
  u32 sum = opened;  // up to this lane
#pragma unroll
  for (u32 distance = 1; distance < lanes; distance *= 2) {
    const u32 more = __shfl_sync(everyone, sum, max(lane, distance) - distance);
    sum += lane >= distance ? more : 0;
  }
  if (lane == lanes - 1) sorted.of_warp[warp] = sum;
  __syncthreads();
  u32 first = sum - opened, all = 0;
#pragma unroll
  for (u32 i = 0; i < streaming_warps; i++) {
    const u32 own = sorted.of_warp[i];
    first += i < warp ? own : 0;
    all += own;
  }
  if (opened) sorted.firsts[expert] = u8(first);
  __syncthreads();
  if (is_there) {
    const u32 entry = sorted.firsts[expert] + rank / two_rows;
    sorted.pairs[entry][rank % two_rows] = u8(pair);
    if (rank % two_rows == 0) sorted.entries[entry] = {params.slots + slot, expert, min(two_rows, total - rank)};
  }
  __syncthreads();
  return all;
}
