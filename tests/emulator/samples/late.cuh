// What chips of compute capability 9.0 have: copies in bulk, products of warpgroups, clusters. Each kernel is right, or
// has the mistake that it is told to have.
#include "basics.h"

enum Mistake : u32 {
  none,
  // of copies
  asked_early,     // no mistake: before the kernel waits for the one before
  awaited_by_one,  // no mistake either: then comes a barrier
  not_awaited,
  awaited_by_one_alone,
  copied_over,
  used_again,
  left_behind,
  too_few_bytes,
  too_few_threads,
  too_many_threads,
  not_aligned,
  never_made,
  made_without_a_barrier,
  stored_behind,
  read_as_memory,
  outside,
  // of products
  not_begun,
  not_shown,
  overwritten,
  overwritten_behind_a_barrier,
  not_read_in_time,
  never_read,
  // of clusters
  no_cluster,
  kept_too_early,
  never_arrived,
  not_arrived_itself,
};

struct LateParams {
  const u32* from;
  u32* to;
  u64 mistake;
};

constexpr u32 threads = 64;

struct CopiedShared {
  uint4 place[threads / 4];
  u32 stored;
  u64 arrival;
};

// Sums of two tiles of 64 words, which lie in one place one after the other. One thread asks.
DEV void sum_copied(const LateParams& params) {
  __shared__ CopiedShared shared;
  const u32 i = threadIdx.x, wrong = u32(params.mistake);
  const u32* words = reinterpret_cast<const u32*>(shared.place);
  if (wrong != asked_early) begin_kernel();
  if (i == 0 && wrong != never_made) make_arrivals(&shared.arrival, 1, wrong == too_few_threads ? 2 : 1);
  if (wrong != made_without_a_barrier) __syncthreads();
  u32 total = 0;
  for (u32 turn = 0; turn < 2; turn++) {
    if (i == (wrong == made_without_a_barrier ? 1 : 0)) {
      if (wrong != stored_behind) shared.stored = turn;
      copy_in_bulk(shared.place + (wrong == outside ? 1 : 0),
                   params.from + turn * threads + (wrong == not_aligned ? 1 : 0), sizeof shared.place, &shared.arrival);
      expect_bytes(&shared.arrival, sizeof shared.place - (wrong == too_few_bytes ? 16 : 0));
      if (wrong == stored_behind) shared.stored = turn;
      if (wrong == too_many_threads) arrive_with_copies(&shared.arrival);
    }
    if (wrong == awaited_by_one || wrong == awaited_by_one_alone ? i == 0 : wrong != not_awaited && wrong != used_again)
      await_arrival(&shared.arrival, turn);
    if (wrong == awaited_by_one) __syncthreads();
    if (wrong != used_again) total += words[threads - 1 - i] + shared.stored;
    if (wrong != copied_over) __syncthreads();
  }
  if (wrong == read_as_memory) total += u32(shared.arrival);
  if (wrong == left_behind && i == 0) {
    copy_in_bulk(shared.place, params.from, sizeof shared.place, &shared.arrival);
    expect_bytes(&shared.arrival, sizeof shared.place);
  }
  if (wrong == asked_early) begin_kernel();
  params.to[i] = total;
}

struct AllCopiedShared {
  uint4 place[threads];
  u64 arrival;
};

// 256 words, of which each thread copies four.
DEV void sum_all_copied(const LateParams& params) {
  __shared__ AllCopiedShared shared;
  const u32 i = threadIdx.x, wrong = u32(params.mistake);
  begin_kernel();
  if (i == 0) make_arrivals(&shared.arrival, 1, threads);
  __syncthreads();
  copy_16(shared.place + i, params.from + 4 * i);
  arrive_with_copies(&shared.arrival);
  if (wrong != not_awaited) await_arrival(&shared.arrival, 0);
  const uint4 four = shared.place[threads - 1 - i];
  params.to[i] = four.x + four.y + four.z + four.w;
}

// Of a[64, 32] . b[32, 32], and behind it twice as much. b is behind a, column by column.
DEV void multiply_all(const LateParams& params) {
  constexpr u32 fragments = 4;
  __shared__ uint4 b[fragments * 16];
  const u32 i = threadIdx.x, g = lane_of() / 4, t = lane_of() % 4, row = warp_of() * 16 + g;
  const u32 wrong = u32(params.mistake);
  begin_kernel();
  const uint4* columns = reinterpret_cast<const uint4*>(params.from + 64 * 8);
  const u32 place = i / 16 * 16 + i % 2 * 8 + i / 2 % 8;
  if (i < fragments * 16) b[place] = columns[i];
  if (wrong != not_shown) show_copies();
  __syncthreads();
  const u32 *a = params.from + row * 8 + t, *below = a + 8 * 8;
  const u64 at = shared_columns(b, 256);
  int c[3][fragments][4];
  if (wrong != not_begun) begin_products();
  multiply_columns<false>(c[0], a[0], below[0], a[4], below[4], at);
  multiply_columns<false>(c[1], a[0], below[0], a[4], below[4], at);
  multiply_columns<true>(c[1], a[0], below[0], a[4], below[4], at);
  multiply_columns<false>(c[2], a[0], below[0], a[4], below[4], at);
  end_products();
  if (wrong == overwritten_behind_a_barrier) __syncthreads();
  if ((wrong == overwritten || wrong == overwritten_behind_a_barrier) && i < fragments * 16) b[place] = {};
  if (wrong != not_read_in_time && wrong != never_read) await_products<0>(c);
  for (u32 d = 0; d < 2; d++)
    for (u32 f = 0; f < fragments; f++)
      for (u32 j = 0; j < 4; j++)
        params.to[((d * 64) + row + j / 2 * 8) * fragments * 8 + f * 8 + 2 * t + j % 2] = u32(c[d][f][j]);
  if (wrong == not_read_in_time) await_products<0>(c);
}

// Two blocks exchange their words.
DEV void exchange(const LateParams& params) {
  __shared__ u32 own[threads];
  const u32 i = threadIdx.x, wrong = u32(params.mistake);
  begin_kernel();
  own[i] = params.to[blockIdx.x * threads + i];
  if (wrong != no_cluster && wrong != not_arrived_itself && (wrong != never_arrived || i > 0)) arrive_in_cluster();
  __syncthreads();
  const u32 given = own[threads - 1 - i];
  if (wrong != no_cluster && wrong != kept_too_early) await_cluster();
  params.to[(blockIdx.x ^ 1) * threads + i] = given;
  if (wrong == kept_too_early) await_cluster();
}

KERNEL(copied, LateParams, (threads), sum_copied)
KERNEL(all_copied, LateParams, (threads), sum_all_copied)
KERNEL(multiplied, LateParams, (2 * threads), multiply_all)
KERNEL(exchanged, LateParams, (threads)CLUSTER_OF(2), exchange)
