// What draws a token without the logits: the greatest of them, listed, and what each block of them weighs.
// csrc/core/shortlist.h says what is listed.
#include "basics.h"

DEV double warp_sum(double x) {
  for (u32 distance = lanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(everyone, x, distance);
  return x;
}
DEV u32 warp_sum(u32 x) {
  for (u32 distance = lanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(everyone, x, distance);
  return x;
}

// The greatest of each group and of each block, what the block weighs, and its first logit that is not finite. Grid of
// blocks of row_threads: blocks of listed_block logits, rows.
extern "C" __global__ void shortlist_blocks(const ShortlistParams params) {
  __shared__ float greatests[row_threads / lanes];
  __shared__ u32 odds[row_threads / lanes];
  __shared__ double sums[row_threads / lanes];
  begin_kernel();
  static_assert(listed_group == lanes, "a warp has a group");
  constexpr u32 together = listed_block / row_threads;
  const ShortlistRow row = params.rows[blockIdx.y];
  const u32 first = blockIdx.x * listed_block + threadIdx.x;
  const float nothing = __uint_as_float(0xff800000u);
  float numbers[together];
#pragma unroll
  for (u32 j = 0; j < together; j++) {
    const u32 at = first + j * row_threads;
    numbers[j] = row.logits[min(at, params.count - 1)];
  }
  float greatest = nothing;
  u32 odd = 0xffffffffu;
#pragma unroll
  for (u32 j = 0; j < together; j++) {
    const u32 at = first + j * row_threads;
    if (at >= params.count)
      numbers[j] = nothing;
    else if ((__float_as_uint(numbers[j]) & 0x7f800000u) == 0x7f800000u)
      odd = min(odd, at);
    const float of_group = warp_max(numbers[j]);
    greatest = fmaxf(greatest, of_group);
    if (lane_of() == 0 && at < params.count) row.groups[at / listed_group] = of_group;
  }
  odd = warp_min(odd);
  if (lane_of() == 0) greatests[warp_of()] = greatest, odds[warp_of()] = odd;
  __syncthreads();
  const u32 warps = row_threads / lanes;
  greatest = warp_max(lane_of() < warps ? greatests[lane_of()] : nothing);
  double sum = 0.0;
#pragma unroll
  for (u32 j = 0; j < together; j++) sum += exp2((double(numbers[j]) - double(greatest)) * row.factor);
  sum = warp_sum(sum);
  if (lane_of() == 0) sums[warp_of()] = sum;
  __syncthreads();
  if (warp_of() > 0) return;
  odd = warp_min(lane_of() < warps ? odds[lane_of()] : 0xffffffffu);
  sum = warp_sum(lane_of() < warps ? sums[lane_of()] : 0.0);
  if (lane_of() == 0) row.blocks[blockIdx.x] = {sum, greatest, odd};
}

// ---- The list -------------------------------------------------------------------------------------------------------

constexpr u32 list_threads = list_warps * lanes, groups_of_warp = most_listed_groups / list_warps;
static_assert(list_warps == lanes, "a warp has a number of each warp");

// The class of a logit: how far it is below the greatest, with seven bits behind the first. Without the sign, which
// the distance of a zero from another may have.
DEV u32 class_of(float greatest, float logit) { return __float_as_uint(greatest - logit) >> 16 & 0x7fffu; }

// Of a number of each warp, the sum of all, and of those before the caller's. Every thread calls it; `scratch` has
// room for a number of each warp.
struct Sums {
  u32 all;
  u32 before;
};
DEV Sums sums_of_warps(u32 of_warp, u32* scratch) {
  __syncthreads();  // nobody needs what was there
  if (lane_of() == 0) scratch[warp_of()] = of_warp;
  __syncthreads();
  const u32 other = scratch[lane_of()];
  return {warp_sum(other), warp_sum(lane_of() < warp_of() ? other : 0)};
}

// How many groups have a logit of a class below `limit`.
DEV u32 count_groups(const ShortlistRow& row, u32 groups, float greatest, u32 limit, u32* scratch) {
  u32 count = 0;
#pragma unroll 4
  for (u32 i = threadIdx.x; i < groups; i += list_threads) count += class_of(greatest, row.groups[i]) < limit;
  return sums_of_warps(warp_sum(count), scratch).all;
}

// Into `chosen` those groups, ascending. They are at most most_listed_groups.
DEV u32 choose_groups(const ShortlistRow& row, u32 groups, float greatest, u32 limit, u32* chosen, u32* scratch) {
  const u32 stretch = (groups + list_threads - 1) / list_threads * lanes, first = warp_of() * stretch;
  const auto is_chosen = [&](u32 i) { return i < groups && class_of(greatest, row.groups[i]) < limit; };
  u32 count = 0;
#pragma unroll 2
  for (u32 i = first + lane_of(); i < first + stretch + lane_of(); i += lanes)
    count += count_bits(__ballot_sync(everyone, is_chosen(i)));
  const Sums sums = sums_of_warps(count, scratch);
  u32 place = sums.before;
#pragma unroll 2
  for (u32 i = first + lane_of(); i < first + stretch + lane_of(); i += lanes) {
    const u32 votes = __ballot_sync(everyone, is_chosen(i));
    if (is_chosen(i)) chosen[place + count_bits(votes & ((1u << lane_of()) - 1))] = i;
    place += count_bits(votes);
  }
  __syncthreads();
  return sums.all;
}

// Calls body(votes, at, logit) of each chosen group that the warp has: which of its logits are of a class below
// `limit`, and the caller's, where it is and what it is.
template <typename Body>
DEV void each_chosen(const ShortlistRow& row, u32 count, float greatest, u32 limit, const u32* chosen, u32 groups,
                     const Body& body) {
  constexpr u32 together = 16;
#pragma unroll 1
  for (u32 first = 0; first < groups_of_warp; first += together) {
    float logits[together];
#pragma unroll
    for (u32 i = 0; i < together; i++) {
      const u32 place = warp_of() * groups_of_warp + first + i;
      logits[i] = place < groups ? row.logits[min(chosen[place] * listed_group + lane_of(), count - 1)] : 0.0f;
    }
#pragma unroll
    for (u32 i = 0; i < together; i++) {
      const u32 place = warp_of() * groups_of_warp + first + i;
      if (place >= groups) continue;  // all lanes of the warp
      const u32 at = chosen[place] * listed_group + lane_of();
      body(__ballot_sync(everyone, at < count && class_of(greatest, logits[i]) < limit), at, logits[i]);
    }
  }
}

// The likeliest token, the first odd one, and the list. Grid of blocks of list_threads: rows.
extern "C" __global__ void __launch_bounds__(list_warps* lanes) shortlist(const ShortlistParams params) {
  __shared__ u32 chosen[most_listed_groups];
  __shared__ u32 scratch[list_warps];
  __shared__ float greatests[list_warps];
  begin_kernel();
  const ShortlistRow row = params.rows[blockIdx.x];
  const u32 groups = (params.count + listed_group - 1) / listed_group;
  float greatest = __uint_as_float(0xff800000u);
  u32 odd = 0xffffffffu;
#pragma unroll 4
  for (u32 i = threadIdx.x; i < params.blocks; i += list_threads) {
    greatest = fmaxf(greatest, row.blocks[i].greatest);
    odd = min(odd, row.blocks[i].odd);
  }
  greatest = warp_max(greatest);
  odd = warp_min(odd);
  if (lane_of() == 0) greatests[warp_of()] = greatest, scratch[warp_of()] = odd;
  __syncthreads();
  greatest = warp_max(greatests[lane_of()]);
  odd = warp_min(scratch[lane_of()]);

  // The first group that has it, then its first logit.
  u32 first = groups;
#pragma unroll 4
  for (u32 i = threadIdx.x; i < groups; i += list_threads)
    if (row.groups[i] == greatest) first = min(first, i);
  first = warp_min(first);
  __syncthreads();
  if (lane_of() == 0) scratch[warp_of()] = first;
  __syncthreads();
  first = min(warp_min(scratch[lane_of()]), groups - 1);
  if (warp_of() == 0) {
    const u32 at = first * listed_group + lane_of();
    const bool is_greatest = at < params.count && row.logits[at] == greatest;
    const u32 likeliest = warp_min(is_greatest ? at : 0xffffffffu);
    if (lane_of() == 0) {
      row.head[0] = likeliest == 0xffffffffu ? 0 : int(likeliest);
      row.head[1] = int(odd);
    }
  }

  // Classes as far as they have room: of groups, and then of logits.
  u32 listed = 0;
#pragma unroll 1
  for (u32 most = most_listed_groups; most > 0; most /= 2) {
    u32 limit = 0;
#pragma unroll 1
    for (u32 bit = 1u << 14; bit > 0; bit /= 2)
      if (count_groups(row, groups, greatest, limit | bit, scratch) <= most) limit |= bit;
    const u32 some = choose_groups(row, groups, greatest, limit, chosen, scratch);
    u32 count = 0;
    each_chosen(row, params.count, greatest, limit, chosen, some,
                [&](u32 votes, u32, float) { count += count_bits(votes); });
    const Sums sums = sums_of_warps(count, scratch);
    if (sums.all > most_listed) continue;
    listed = sums.all;
    u32 next = sums.before;
    each_chosen(row, params.count, greatest, limit, chosen, some, [&](u32 votes, u32 at, float logit) {
      const u32 place = next + count_bits(votes & ((1u << lane_of()) - 1));
      if (votes >> lane_of() & 1) row.tokens[place] = int(at), row.values[place] = logit;
      next += count_bits(votes);
    });
    break;
  }
  if (threadIdx.x == 0) row.head[2] = int(listed), row.head[3] = 0;
}
