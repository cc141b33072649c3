// Choices: of the experts for a token, and of the best tokens of a vocabulary.
//
// The best comes first and the lower id wins a tie. A NaN is worse than any number when choosing, so ids are always
// distinct and in range.
#include "choice.h"

constexpr u32 most_ranked = 8;  // experts of a row, where threads count who comes before theirs

DEV u64 warp_best(u64 key) {
  for (u32 distance = lanes / 2; distance > 0; distance /= 2) {
    const u32 high = __shfl_xor_sync(everyone, u32(key >> 32), distance);
    key = max(key, u64(high) << 32 | __shfl_xor_sync(everyone, u32(key), distance));
  }
  return key;
}

// ---- Routers --------------------------------------------------------------------------------------------------------

// Takes the best of `keys`. A warp finds it together: lane l looks after numbers l, l + 32 ...
DEV u64 take_best(u64* keys, u32 count) {
  u64 best = 0;
#pragma unroll 8
  for (u32 i = lane_of(); i < count; i += lanes) best = max(best, keys[i]);
  best = warp_best(best);
  if (id_of(best) % lanes == lane_of()) keys[id_of(best)] = 0;
  return best;
}

// Takes the experts of all groups but those that are worth most. A warp does it together, after each lane wrote the
// worths of its groups.
DEV void take_other_groups(const RouteParams& params, u64* worths, u32* kept, u64* keys) {
  const u32 lane = lane_of(), size = params.experts / params.groups;
  for (u32 group = lane; group < params.groups; group += lanes) kept[group] = 0;
  __syncwarp();
  for (u32 i = 0; i < params.groups_kept; i++) {
    const u64 best = take_best(worths, params.groups);
    if (lane == 0) kept[id_of(best)] = 1;
  }
  __syncwarp();
  for (u32 i = lane; i < params.experts; i += lanes)
    if (kept[i / size] == 0) keys[i] = 0;
}

// The weights are probabilities among all experts. With groups, one is worth its best expert, so the best of all is
// among those kept. A warp for each row.
extern "C" __global__ void route_softmax(const RouteParams params) {
  __shared__ u64 keys[max_experts], worths[max_experts];
  __shared__ u32 kept[max_experts];
  __shared__ float chosen[max_experts];
  begin_kernel();
  const u32 lane = lane_of();
  const float* logits = params.logits + u64(blockIdx.x) * params.experts;
  int* ids = params.ids + u64(blockIdx.x) * params.k;
  float* weights = params.weights + u64(blockIdx.x) * params.k;
#pragma unroll 8
  for (u32 i = lane; i < params.experts; i += lanes) keys[i] = candidate(logits[i], i);
  if (params.groups != 0) {
    __syncwarp();
    const u32 size = params.experts / params.groups;
    for (u32 group = lane; group < params.groups; group += lanes) {
      u64 best = 0;
      for (u32 i = group * size; i < (group + 1) * size; i++) best = max(best, keys[i]);
      worths[group] = candidate(value_of(best), group);
    }
    take_other_groups(params, worths, kept, keys);
  }
  float highest = 0.0f, total = 0.0f;
  for (u32 place = 0; place < params.k; place++) {
    const u64 best = take_best(keys, params.experts);
    if (place == 0) {
      highest = value_of(best);
#pragma unroll 8
      for (u32 i = lane; i < params.experts; i += lanes) total += expf(logits[i] - highest);
      total = warp_sum(total);
    }
    if (lane != place % lanes) continue;  // who finishes the weight
    ids[place] = int(id_of(best));
    chosen[place] = expf(value_of(best) - highest) / total;
  }
  finish_weights(params, chosen, weights);
  for (u32 i = lane; i < params.k && params.factors; i += lanes) weights[i] *= params.factors[ids[i]];
}

// How many of some keys are above a limit.
template <u32 count>
DEV u32 keys_above(const u32* keys, u32 limit) {
  u32 above = 0;
#pragma unroll
  for (u32 j = 0; j < count; j += 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(keys + j);
    above += (four.x > limit ? 1 : 0) + (four.y > limit ? 1 : 0);
    above += (four.z > limit ? 1 : 0) + (four.w > limit ? 1 : 0);
  }
  return above;
}

// Where a row chooses hardly more than some. Nobody waits for the best to be taken, and then for the next: a thread has
// an expert, and counts who comes before it, first among those of its warp. The best of each warp are compared with one
// another then, each by a few threads.
DEV void choose_by_ranks(const RouteParams& params, const float* logits, int* to, float* weights) {
  constexpr u32 warps = few_experts / lanes, best = most_ranked * warps, each = few_experts / best;
  __shared__ uint4 space[few_experts / 4], best_space[best / 4];  // keys
  __shared__ float powers[few_experts], chosen[most_ranked];
  __shared__ int best_ids[best], ids[most_ranked];
  u32 *keys = reinterpret_cast<u32*>(space), *best_keys = reinterpret_cast<u32*>(best_space);
  const u32 own = threadIdx.x, lane = lane_of(), warp = warp_of();
  const float logit = logits[min(own, params.experts - 1)];
  // In the order of the logits: 2 is NaN, and 1 nobody.
  const u32 key = own < params.experts ? max(u32(candidate(logit, 0) >> 32), 2u) : 1u;
  keys[own] = key;
  __syncwarp();
  const u32* of_warp = keys + warp * lanes;
  u32 before = lane;
  if (warp * lanes < params.experts) {
    before = keys_above<lanes>(of_warp, key);
    if (warp_total(before) != lanes * (lanes - 1) / 2) {  // of the same logits the first
#pragma unroll 1
      for (u32 j = 0; j < lane; j++) before += of_warp[j] == key ? 1 : 0;
    }
  }
  if (before < most_ranked) {
    best_keys[warp * most_ranked + before] = key;
    best_ids[warp * most_ranked + before] = int(own);
  }
  __syncthreads();
  const auto logit_of = [](u32 key) { return value_of(u64(key == 2 ? 0 : key) << 32); };
  u32 highest_key = 0;
#pragma unroll
  for (u32 i = 0; i < warps; i++) highest_key = max(highest_key, best_keys[i * most_ranked]);
  const float highest = logit_of(highest_key);
  powers[own] = own < params.experts ? expf(logit - highest) : 0.0f;
  // Of the same logits those of the warps before come first.
  const u32 place = own / each, place_key = best_keys[place], from = place / most_ranked;
  u32 rank = 0;
#pragma unroll
  for (u32 i = 0; i < warps / each; i++) {
    const u32 other = own % each * (warps / each) + i;
    const u32 above = keys_above<most_ranked>(best_keys + other * most_ranked, place_key - (other < from ? 1 : 0));
    rank += other == from ? place % most_ranked : above;
  }
#pragma unroll
  for (u32 distance = 1; distance < each; distance *= 2) rank += __shfl_xor_sync(everyone, rank, distance);
  if (own % each == 0 && rank < params.k) ids[rank] = best_ids[place], chosen[rank] = logit_of(place_key);
  __syncthreads();
  if (warp > 0) return;
  float total = 0.0f;
#pragma unroll
  for (u32 j = 0; j < warps; j++) total += powers[lane + j * lanes];
  total = warp_sum(total);
  const bool is_there = lane < params.k;
  const float share = is_there ? expf(chosen[lane] - highest) / total : 0.0f;
  float sum = 0.0f;
#pragma unroll
  for (u32 i = 0; i < most_ranked; i++) sum += __shfl_sync(everyone, share, i);
  const float divisor = params.normalize && sum > 0.0f ? sum : 1.0f;
  if (!is_there) return;
  const float weight = share / divisor * params.scaling;
  to[lane] = ids[lane];
  weights[lane] = params.factors ? weight * params.factors[ids[lane]] : weight;
}

// The same for few experts without groups. Grid of blocks of few_experts threads: rows.
extern "C" __global__ void __launch_bounds__(few_experts, 1) route_softmax_few(const RouteParams params) {
  __shared__ float chosen[few_experts];
  __shared__ int ids[few_experts];
  begin_kernel();
  const float* of_row = params.logits + u64(blockIdx.x) * params.experts;
  int* to = params.ids + u64(blockIdx.x) * params.k;
  float* weights = params.weights + u64(blockIdx.x) * params.k;
  if (params.k <= most_ranked) return choose_by_ranks(params, of_row, to, weights);
  if (warp_of() > 0) return;
  FewLogits logits;
  logits.load(of_row, params.experts);
  choose_of_few(logits, params.experts, params.k, ids, chosen);
  keep_choice(params, logits, ids, chosen, to, weights);
}

// The sum of the two best of a group, or the only one of a group of one.
DEV float group_worth(const u64* choice, u32 size) {
  u64 first = 0, second = 0;
  for (u32 i = 0; i < size; i++) {
    second = max(second, min(first, choice[i]));
    first = max(first, choice[i]);
  }
  return size == 1 ? value_of(first) : value_of(first) + value_of(second);
}

// noaux_tc: the bias helps to choose, and has no part in the weights. A warp for each row.
extern "C" __global__ void route_grouped(const RouteParams params) {
  __shared__ u64 choice[max_experts], worths[max_experts];
  __shared__ u32 kept[max_experts];
  __shared__ float chosen[max_experts];
  begin_kernel();
  const u32 lane = lane_of(), size = params.experts / params.groups;
  const float* logits = params.logits + u64(blockIdx.x) * params.experts;
  int* ids = params.ids + u64(blockIdx.x) * params.k;
  float* weights = params.weights + u64(blockIdx.x) * params.k;
  for (u32 i = lane; i < params.experts; i += lanes) choice[i] = candidate(sigmoid(logits[i]) + params.bias[i], i);
  __syncwarp();
  for (u32 group = lane; group < params.groups; group += lanes)
    worths[group] = candidate(group_worth(choice + group * size, size), group);
  take_other_groups(params, worths, kept, choice);
  for (u32 place = 0; place < params.k; place++) {
    const u64 best = take_best(choice, params.experts);
    if (lane != place % lanes) continue;  // who finishes the weight
    ids[place] = int(id_of(best));
    chosen[place] = sigmoid(logits[id_of(best)]);
  }
  finish_weights(params, chosen, weights);
}

// ---- Pairs of experts -----------------------------------------------------------------------------------------------

// body(pair, expert, place) for each pair of the warp's stretch: its place among those of the expert there, after what
// `counts` has. All lanes of the warp.
template <class Body>
DEV void each_pair(const GroupParams& params, u16 (&counts)[max_experts], Body body) {
  const u32 lane = lane_of(), chunks = (params.count + lanes - 1) / lanes;
  const u32 of_warp = (chunks + group_warps - 1) / group_warps, first = warp_of() * of_warp;
  for (u32 chunk = first; chunk < min(first + of_warp, chunks); chunk++) {
    const u32 pair = chunk * lanes + lane;
    const bool is_there = pair < params.count;
    const u32 expert = is_there ? u32(params.ids[pair]) : max_experts;
    const u32 peers = warp_peers(expert), before = count_bits(peers & ((1u << lane) - 1));
    const u32 place = is_there ? counts[expert] + before : 0;
    __syncwarp();
    if (is_there && before == 0) counts[expert] = u16(place + count_bits(peers));
    __syncwarp();
    if (is_there) body(pair, expert, place);
  }
}

// Pairs by their experts, and in their order, as blocks of pairs of one expert. One block: each warp has a stretch of
// the pairs, and counts those of each expert; a pair's place follows from the counts before it.
extern "C" __global__ void __launch_bounds__(group_warps* lanes) group_experts(const GroupParams params) {
  __shared__ u16 counts[group_warps][max_experts];                // of a warp, then of those before it
  __shared__ u32 begins[max_experts], block_begins[max_experts];  // of an expert's pairs and blocks
  __shared__ u32 totals[max_experts + 1];
  begin_kernel();
  const u32 lane = lane_of(), warp = warp_of(), threads = group_warps * lanes;
  for (u32 i = threadIdx.x; i < group_warps * max_experts; i += threads) counts[i / max_experts][i % max_experts] = 0;
  __syncthreads();
  each_pair(params, counts[warp], [](u32, u32, u32) {});
  __syncthreads();
  for (u32 expert = threadIdx.x; expert < params.experts; expert += threads) {
    u32 total = 0;
#pragma unroll
    for (u32 i = 0; i < group_warps; i++) {
      const u32 own = counts[i][expert];
      counts[i][expert] = u16(total);
      total += own;
    }
    totals[expert] = total;
  }
  __syncthreads();
  const auto blocks_of = [&](u32 expert) { return (totals[expert] + params.block_rows - 1) / params.block_rows; };
  if (warp == 0) {  // sums of all before, over a stretch of the experts a lane
    const u32 stretch = (params.experts + lanes - 1) / lanes, first = min(lane * stretch, params.experts),
              end = min(first + stretch, params.experts);
    u32 pairs = 0, blocks = 0;
    for (u32 expert = first; expert < end; expert++) pairs += totals[expert], blocks += blocks_of(expert);
    const u32 own_pairs = pairs, own_blocks = blocks;
    for (u32 distance = 1; distance < lanes; distance *= 2) {
      const u32 from = lane >= distance ? lane - distance : lane;
      const u32 more_pairs = __shfl_sync(everyone, pairs, from), more_blocks = __shfl_sync(everyone, blocks, from);
      if (lane >= distance) pairs += more_pairs, blocks += more_blocks;
    }
    if (lane == lanes - 1) totals[max_experts] = blocks;
    pairs -= own_pairs, blocks -= own_blocks;
    for (u32 expert = first; expert < end; expert++) {
      begins[expert] = pairs, block_begins[expert] = blocks;
      pairs += totals[expert], blocks += blocks_of(expert);
    }
  }
  __syncthreads();
  each_pair(params, counts[warp],
            [&](u32 pair, u32 expert, u32 place) { params.pairs[begins[expert] + place] = pair; });
  for (u32 expert = threadIdx.x; expert < params.experts; expert += threads)
    for (u32 i = 0; i < blocks_of(expert); i++)
      params.blocks[block_begins[expert] + i] = {
          params.slots + params.slot_of[expert], begins[expert] + i * params.block_rows,
          min(params.block_rows, totals[expert] - i * params.block_rows), expert, 0};
  for (u32 i = totals[max_experts] + threadIdx.x; i < params.most_blocks; i += threads)
    params.blocks[i] = {params.slots, 0, 0, 0, 0};
}

// The choice of some rows, as route_softmax_few makes it, and their pairs, as group_experts has them: a row has no
// expert twice. One block: a warp for each row at least, and a thread for each expert.
extern "C" __global__ void __launch_bounds__(many_rows* lanes) route_rows(const RouteRowsParams params) {
  __shared__ float chosen[many_rows][lanes];
  __shared__ int ids[many_rows][lanes];
  __shared__ u8 places[many_rows][few_experts];  // of a row's pair with the expert, from 1 on
  __shared__ u32 begins[few_experts / lanes][2];
  let_next_come();
  const u32 lane = lane_of(), warp = warp_of(), expert = threadIdx.x, k = params.route.k,
            experts = params.route.experts;
  const GroupParams& group = params.group;
#pragma unroll
  for (u32 i = 0; i < few_experts / lanes / 4; i++) reinterpret_cast<u32*>(places[warp])[lane + i * lanes] = 0;
  __syncwarp();
  const u64 slot = expert < experts ? group.slot_of[expert] : 0;  // the table was there before the batch
  wait_for_previous();
  if (warp < params.n) {
    FewLogits logits;
    logits.load(params.route.logits + u64(warp) * experts, experts);
    choose_of_few(logits, experts, k, ids[warp], chosen[warp]);
    if (lane < k) places[warp][ids[warp][lane]] = u8(lane + 1);
    keep_choice(params.route, logits, ids[warp], chosen[warp], params.route.ids + u64(warp) * k,
                params.route.weights + u64(warp) * k);
  }
  __syncthreads();
  u32 pairs = 0, blocks = 0, sums[2] = {};  // sums: of the warp's experts up to this one
  if (expert < few_experts) {
#pragma unroll 8
    for (u32 r = 0; r < params.n; r++) pairs += places[r][expert] ? 1 : 0;
    blocks = (pairs + group.block_rows - 1) / group.block_rows;
    sums[0] = pairs, sums[1] = blocks;
#pragma unroll
    for (u32 j = 0; j < 2; j++)
      for (u32 distance = 1; distance < lanes; distance *= 2) {
        const u32 more = __shfl_sync(everyone, sums[j], max(lane, distance) - distance);
        sums[j] += lane >= distance ? more : 0;
      }
    if (lane == lanes - 1) begins[warp][0] = sums[0], begins[warp][1] = sums[1];
  }
  __syncthreads();
  u32 used = 0, first_pair = 0, first_block = 0;
#pragma unroll
  for (u32 i = 0; i < few_experts / lanes; i++) {
    first_pair += i < warp ? begins[i][0] : 0, first_block += i < warp ? begins[i][1] : 0;
    used += begins[i][1];
  }
  for (u32 i = used + threadIdx.x; i < group.most_blocks; i += blockDim.x) group.blocks[i] = {group.slots, 0, 0, 0, 0};
  if (pairs == 0) return;
  first_pair += sums[0] - pairs, first_block += sums[1] - blocks;
  for (u32 i = 0; i < blocks; i++)
    group.blocks[first_block + i] = {group.slots + slot, first_pair + i * group.block_rows,
                                     min(group.block_rows, pairs - i * group.block_rows), expert, 0};
#pragma unroll 8
  for (u32 r = 0; r < params.n; r++)
    if (const u32 place = places[r][expert]) group.pairs[first_pair++] = r * k + place - 1;
}

// ---- Top-k ----------------------------------------------------------------------------------------------------------

// The best of every block of top_k_block candidates, in order. It is launched again on what is left until one block is
// left. Grid of blocks of row_threads.
extern "C" __global__ void top_k(const TopKParams params) {
  __shared__ u64 keys[top_k_block];
  __shared__ u64 best_of_warp[row_threads / lanes];
  begin_kernel();
  const u32 first = blockIdx.x * top_k_block;
  const u32 left = min(params.k, params.count - first);  // every block but the last has k of them
  float* best_values = params.best_values + u64(blockIdx.x) * params.k;
  int* best_ids = params.best_ids + u64(blockIdx.x) * params.k;
  u64 best = 0;
  for (u32 i = threadIdx.x; i < top_k_block; i += row_threads) {
    const u32 at = first + i;
    keys[i] = at < params.count ? candidate(params.values[at], params.ids ? u32(params.ids[at]) : at) : 0;
    best = max(best, keys[i]);
  }
  if (params.k == 1) {
    best = warp_best(best);
    if (lane_of() == 0) best_of_warp[warp_of()] = best;
    __syncthreads();
    best = warp_best(lane_of() < row_threads / lanes ? best_of_warp[lane_of()] : 0);
    if (threadIdx.x == 0) best_values[0] = value_of(best), best_ids[0] = int(id_of(best));
    return;
  }
  // A bitonic sort: runs of length `run` are sorted, up and down in turn, then runs of twice that length.
  for (u32 run = 2; run <= top_k_block; run *= 2)
    for (u32 distance = run / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (u32 pair = threadIdx.x; pair < top_k_block / 2; pair += row_threads) {
        const u32 low = (pair & ~(distance - 1)) * 2 + (pair & (distance - 1)), high = low + distance;
        const u64 a = keys[low], b = keys[high];
        if ((low & run) == 0 ? b > a : a > b) keys[low] = b, keys[high] = a;
      }
    }
  __syncthreads();
  for (u32 i = threadIdx.x; i < left; i += row_threads) {
    best_values[i] = value_of(keys[i]);
    best_ids[i] = int(id_of(keys[i]));
  }
}

// The best, and the first that is not finite. Each block of the first round leaves a candidate, and the place of the
// first odd one. Grid of blocks of row_threads: blocks of top_k_block, then one; rows.
extern "C" __global__ void survey(const SurveyParams params) {
  __shared__ u64 bests[row_threads / lanes];
  __shared__ u32 firsts[row_threads / lanes];
  begin_kernel();
  constexpr u32 together = top_k_block / row_threads;
  const float* values = params.rows ? params.rows[blockIdx.y].logits : params.values;
  const u32 count = u32(params.count);
  u64 best = 0;
  u32 odd = 0xffffffffu;  // the place of the first
  if (params.found == nullptr) {
    float numbers[together];
#pragma unroll
    for (u32 j = 0; j < together; j++) {
      const u32 at = blockIdx.x * top_k_block + j * row_threads + threadIdx.x;
      numbers[j] = values[min(at, count - 1)];
    }
#pragma unroll
    for (u32 j = 0; j < together; j++) {
      const u32 at = blockIdx.x * top_k_block + j * row_threads + threadIdx.x;
      if (at >= count) continue;
      best = max(best, candidate(numbers[j], at));
      if ((__float_as_uint(numbers[j]) & 0x7f800000u) == 0x7f800000u) odd = min(odd, at);
    }
  } else {
    const auto* found = params.found + u64(blockIdx.y) * count * 2;
    for (u32 i = threadIdx.x; i < count; i += row_threads) {
      best = max(best, found[2 * i]);
      odd = min(odd, u32(found[2 * i + 1]));
    }
  }
  best = warp_best(best);
  odd = warp_min(odd);
  if (lane_of() == 0) bests[warp_of()] = best, firsts[warp_of()] = odd;
  __syncthreads();
  if (warp_of() > 0) return;
  const u32 warps = row_threads / lanes;
  best = warp_best(lane_of() < warps ? bests[lane_of()] : 0);
  odd = warp_min(lane_of() < warps ? firsts[lane_of()] : 0xffffffffu);
  if (lane_of() > 0) return;
  if (params.best) {
    auto* to = params.best + (u64(blockIdx.y) * gridDim.x + blockIdx.x) * 2;
    to[0] = best, to[1] = odd;
  } else {
    int* result = params.rows ? params.rows[blockIdx.y].head : params.result;
    result[0] = int(id_of(best));
    result[1] = odd == 0xffffffffu ? -1 : int(odd);
  }
}
