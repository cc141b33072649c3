// Choices: of the experts for a token, and of the best tokens of a vocabulary.
//
// The best comes first and the lower id wins a tie. A NaN is worse than any number when choosing, so ids are always
// distinct and in range.
#include "basics.h"

struct Candidate {
  float value;
  u32 id;
};

constexpr u32 no_candidate = 0xffffffffu;  // an id that comes after all others

DEV bool comes_before(Candidate a, Candidate b) {
  if (a.id == no_candidate || b.id == no_candidate) return b.id == no_candidate && a.id != no_candidate;
  if (is_nan(a.value) != is_nan(b.value)) return is_nan(b.value);
  if (a.value != b.value && !is_nan(a.value)) return a.value > b.value;
  return a.id < b.id;
}

// ---- Routers --------------------------------------------------------------------------------------------------------

// Takes the best of `values` that was not taken before. A warp finds it together: lane l looks after numbers l, l + 32
// ..., and the bits of its `taken` say which of them are gone.
DEV Candidate take_best(const float* values, u32 count, u32& taken) {
  const u32 lane = lane_of();
  Candidate best = {0.0f, no_candidate};
  for (u32 i = lane; i < count; i += lanes) {
    const Candidate other = {values[i], i};
    if ((taken >> (i / lanes) & 1u) == 0 && comes_before(other, best)) best = other;
  }
  for (u32 distance = lanes / 2; distance > 0; distance /= 2) {
    const float value = __shfl_xor_sync(everyone, best.value, distance);
    const Candidate other = {value, __shfl_xor_sync(everyone, best.id, distance)};
    if (comes_before(other, best)) best = other;
  }
  if (best.id % lanes == lane) taken |= 1u << (best.id / lanes);
  return best;
}

// Divides the weights by their sum, if that is asked for and the sum is above 0. Then multiplies them by the scaling.
// One lane does it.
DEV void finish_weights(const RouteParams& params, float* weights) {
  float total = 0.0f;
  for (u32 i = 0; i < params.k; i++) total += weights[i];
  const float divisor = params.normalize && total > 0.0f ? total : 1.0f;
  for (u32 i = 0; i < params.k; i++) weights[i] = weights[i] / divisor * params.scaling;
}

// Marks in `taken` the experts of all groups but those that are worth most. A warp does it together, and wrote the
// worths before.
DEV void take_other_groups(const RouteParams& params, const float* worths, u32* kept, u32& taken) {
  const u32 lane = lane_of(), size = params.experts / params.groups;
  for (u32 group = lane; group < params.groups; group += lanes) kept[group] = 0;
  __syncwarp();
  u32 taken_groups = 0;
  for (u32 i = 0; i < params.groups_kept; i++) {
    const Candidate best = take_best(worths, params.groups, taken_groups);
    if (lane == 0) kept[best.id] = 1;
  }
  __syncwarp();
  for (u32 i = lane; i < params.experts; i += lanes)
    if (kept[i / size] == 0) taken |= 1u << (i / lanes);
}

// The best score of a group.
DEV float best_of_group(const float* scores, u32 size) {
  Candidate best = {0.0f, no_candidate};
  for (u32 i = 0; i < size; i++) {
    const Candidate other = {scores[i], i};
    if (comes_before(other, best)) best = other;
  }
  return best.value;
}

// The weights are probabilities among all experts. With groups, one is worth its best expert, so the best of all is
// among those kept. A warp for each row.
extern "C" __global__ void route_softmax(const RouteParams params) {
  __shared__ float values[max_experts], worths[max_experts];
  __shared__ u32 kept[max_experts];
  begin_kernel();
  const u32 lane = lane_of();
  const float* logits = params.logits + u64(blockIdx.x) * params.experts;
  int* ids = params.ids + u64(blockIdx.x) * params.k;
  float* weights = params.weights + u64(blockIdx.x) * params.k;
  for (u32 i = lane; i < params.experts; i += lanes) values[i] = logits[i];
  __syncwarp();
  u32 taken = 0;
  if (params.groups != 0) {
    const u32 size = params.experts / params.groups;
    for (u32 group = lane; group < params.groups; group += lanes)
      worths[group] = best_of_group(values + group * size, size);
    take_other_groups(params, worths, kept, taken);
  }
  float highest = 0.0f, total = 0.0f;
  for (u32 place = 0; place < params.k; place++) {
    const Candidate best = take_best(values, params.experts, taken);
    if (place == 0) {
      highest = best.value;
      for (u32 i = lane; i < params.experts; i += lanes) total += expf(values[i] - highest);
      total = warp_sum(total);
    }
    if (lane == 0) ids[place] = int(best.id);
    if (lane == 0) weights[place] = expf(best.value - highest) / total;
  }
  if (lane == 0) finish_weights(params, weights);
}

// The sum of the two best of a group, or the only one of a group of one.
DEV float group_worth(const float* choice, u32 size) {
  Candidate first = {0.0f, no_candidate}, second = first;
  for (u32 i = 0; i < size; i++) {
    const Candidate other = {choice[i], i};
    if (comes_before(other, first)) {
      second = first;
      first = other;
    } else if (comes_before(other, second)) {
      second = other;
    }
  }
  return size == 1 ? first.value : first.value + second.value;
}

// noaux_tc: the bias helps to choose, and has no part in the weights. A warp for each row.
extern "C" __global__ void route_grouped(const RouteParams params) {
  __shared__ float choice[max_experts], worths[max_experts];
  __shared__ u32 kept[max_experts];
  begin_kernel();
  const u32 lane = lane_of(), size = params.experts / params.groups;
  const float* logits = params.logits + u64(blockIdx.x) * params.experts;
  int* ids = params.ids + u64(blockIdx.x) * params.k;
  float* weights = params.weights + u64(blockIdx.x) * params.k;
  for (u32 i = lane; i < params.experts; i += lanes) choice[i] = sigmoid(logits[i]) + params.bias[i];
  __syncwarp();
  for (u32 group = lane; group < params.groups; group += lanes)
    worths[group] = group_worth(choice + group * size, size);
  u32 taken = 0;
  take_other_groups(params, worths, kept, taken);
  for (u32 place = 0; place < params.k; place++) {
    const Candidate best = take_best(choice, params.experts, taken);
    if (lane == 0) ids[place] = int(best.id);
    if (lane == 0) weights[place] = sigmoid(logits[best.id]);
  }
  if (lane == 0) finish_weights(params, weights);
}

// ---- Top-k ----------------------------------------------------------------------------------------------------------

// The best of every block of top_k_block candidates, in order. It is launched again on what is left until one block is
// left. Grid of blocks of row_threads.
extern "C" __global__ void top_k(const TopKParams params) {
  __shared__ float sorted_values[top_k_block];
  __shared__ u32 sorted_ids[top_k_block];
  begin_kernel();
  const u32 first = blockIdx.x * top_k_block;
  for (u32 i = threadIdx.x; i < top_k_block; i += row_threads) {
    const u32 at = first + i;
    sorted_values[i] = at < params.count ? params.values[at] : 0.0f;
    sorted_ids[i] = at >= params.count ? no_candidate : params.ids ? u32(params.ids[at]) : at;
  }
  // A bitonic sort: runs of length `run` are sorted, up and down in turn, then runs of twice that length.
  for (u32 run = 2; run <= top_k_block; run *= 2)
    for (u32 distance = run / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (u32 pair = threadIdx.x; pair < top_k_block / 2; pair += row_threads) {
        const u32 low = pair / distance * distance * 2 + pair % distance, high = low + distance;
        const Candidate a = {sorted_values[low], sorted_ids[low]}, b = {sorted_values[high], sorted_ids[high]};
        const bool is_upward = (low & run) == 0;
        if (is_upward ? comes_before(b, a) : comes_before(a, b)) {
          sorted_values[low] = b.value;
          sorted_ids[low] = b.id;
          sorted_values[high] = a.value;
          sorted_ids[high] = a.id;
        }
      }
    }
  __syncthreads();
  // Every block but the last has k of them.
  const u32 left = min(params.k, params.count - first);
  for (u32 i = threadIdx.x; i < left; i += row_threads) {
    params.best_values[u64(blockIdx.x) * params.k + i] = sorted_values[i];
    params.best_ids[u64(blockIdx.x) * params.k + i] = int(sorted_ids[i]);
  }
}
