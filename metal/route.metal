// Choices: of the experts for a token, and of the best tokens of a vocabulary.
//
// The best comes first and the lower id wins a tie. A NaN is worse than any number when choosing, so ids are always
// distinct and in range.
#include "common.h"

struct Candidate {
  float value;
  uint id;
};

constant constexpr uint no_candidate = 0xffffffffu;  // an id that comes after all others

inline bool is_nan(float x) { return (as_type<uint>(x) & 0x7fffffffu) > 0x7f800000u; }

inline bool comes_before(Candidate a, Candidate b) {
  if (a.id == no_candidate || b.id == no_candidate) return b.id == no_candidate && a.id != no_candidate;
  if (is_nan(a.value) != is_nan(b.value)) return is_nan(b.value);
  if (a.value != b.value && !is_nan(a.value)) return a.value > b.value;
  return a.id < b.id;
}

// ---- Routers --------------------------------------------------------------------------------------------------------

// Takes the best of `values` that was not taken before. A simdgroup finds it together: lane l looks after numbers l, l
// + 32 ..., and the bits of its `taken` say which of them are gone.
inline Candidate take_best(threadgroup const float* values, uint count, thread uint& taken, uint lane) {
  Candidate best = {0.0f, no_candidate};
  for (uint i = lane; i < count; i += lanes) {
    const Candidate other = {values[i], i};
    if ((taken >> (i / lanes) & 1u) == 0 && comes_before(other, best)) best = other;
  }
  for (ushort distance = lanes / 2; distance > 0; distance /= 2) {
    const Candidate other = {simd_shuffle_xor(best.value, distance), simd_shuffle_xor(best.id, distance)};
    if (comes_before(other, best)) best = other;
  }
  if (best.id % lanes == lane) taken |= 1u << (best.id / lanes);
  return best;
}

// Divides the weights by their sum, if that is asked for and the sum is above 0. Then multiplies them by the scaling.
// One lane does it.
inline void finish_weights(constant RouteParams& params, device float* weights) {
  float total = 0.0f;
  for (uint i = 0; i < params.k; i++) total += weights[i];
  const float divisor = params.normalize != 0 && total > 0.0f ? total : 1.0f;
  for (uint i = 0; i < params.k; i++) weights[i] = weights[i] / divisor * params.scaling;
}

// Marks in `taken` the experts of all groups but those that are worth most. A simdgroup does it together, and wrote the
// worths before.
inline void take_other_groups(constant RouteParams& params, threadgroup const float* worths, threadgroup uint* kept,
                              thread uint& taken, uint lane) {
  const uint size = params.experts / params.groups;
  for (uint group = lane; group < params.groups; group += lanes) kept[group] = 0;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  uint taken_groups = 0;
  for (uint i = 0; i < params.groups_kept; i++) {
    const Candidate best = take_best(worths, params.groups, taken_groups, lane);
    if (lane == 0) kept[best.id] = 1;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = lane; i < params.experts; i += lanes)
    if (kept[i / size] == 0) taken |= 1u << (i / lanes);
}

// The best score of a group.
inline float best_of_group(threadgroup const float* scores, uint size) {
  Candidate best = {0.0f, no_candidate};
  for (uint i = 0; i < size; i++) {
    const Candidate other = {scores[i], i};
    if (comes_before(other, best)) best = other;
  }
  return best.value;
}

// The weights are probabilities among all experts. With groups, one is worth its best expert, so the best of all is
// among those kept. Factors, if there are any, are of the experts. A simdgroup for each row.
kernel void route_softmax(constant RouteParams& params [[buffer(0)]], device const float* logits [[buffer(1)]],
                          device const float* factors [[buffer(2)]], device int* ids [[buffer(3)]],
                          device float* weights [[buffer(4)]], uint row [[threadgroup_position_in_grid]],
                          uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float values[max_experts], worths[max_experts];
  threadgroup uint kept[max_experts];
  logits += ulong(row) * params.experts;
  ids += ulong(row) * params.k;
  weights += ulong(row) * params.k;
  for (uint i = lane; i < params.experts; i += lanes) values[i] = logits[i];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  uint taken = 0;
  if (params.groups != 0) {
    const uint size = params.experts / params.groups;
    for (uint group = lane; group < params.groups; group += lanes)
      worths[group] = best_of_group(values + group * size, size);
    take_other_groups(params, worths, kept, taken, lane);
  }
  float highest = 0.0f, total = 0.0f;
  for (uint slot = 0; slot < params.k; slot++) {
    const Candidate best = take_best(values, params.experts, taken, lane);
    if (slot == 0) {
      highest = best.value;
      for (uint i = lane; i < params.experts; i += lanes) total += precise::exp(values[i] - highest);
      total = simd_sum(total);
    }
    if (lane == 0) ids[slot] = int(best.id);
    if (lane == 0) weights[slot] = precise::exp(best.value - highest) / total;
  }
  if (lane != 0) return;
  finish_weights(params, weights);
  for (uint slot = 0; slot < params.k && params.has_factors != 0; slot++) weights[slot] *= factors[ids[slot]];
}

// The sum of the two best of a group, or the only one of a group of one.
inline float group_worth(threadgroup const float* choice, uint size) {
  Candidate first = {0.0f, no_candidate}, second = first;
  for (uint i = 0; i < size; i++) {
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

// noaux_tc: the bias helps to choose, and has no part in the weights. A simdgroup for each row.
kernel void route_grouped(constant RouteParams& params [[buffer(0)]], device const float* logits [[buffer(1)]],
                          device const float* bias [[buffer(2)]], device int* ids [[buffer(3)]],
                          device float* weights [[buffer(4)]], uint row [[threadgroup_position_in_grid]],
                          uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float choice[max_experts], worths[max_experts];
  threadgroup uint kept[max_experts];
  const uint size = params.experts / params.groups;
  logits += ulong(row) * params.experts;
  ids += ulong(row) * params.k;
  weights += ulong(row) * params.k;
  for (uint i = lane; i < params.experts; i += lanes) choice[i] = sigmoid(logits[i]) + bias[i];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint group = lane; group < params.groups; group += lanes)
    worths[group] = group_worth(choice + group * size, size);
  uint taken = 0;
  take_other_groups(params, worths, kept, taken, lane);
  for (uint slot = 0; slot < params.k; slot++) {
    const Candidate best = take_best(choice, params.experts, taken, lane);
    if (lane == 0) ids[slot] = int(best.id);
    if (lane == 0) weights[slot] = sigmoid(logits[best.id]);
  }
  if (lane == 0) finish_weights(params, weights);
}

// ---- Top-k ----------------------------------------------------------------------------------------------------------

// The best of every block of top_k_block candidates, in order. It is dispatched again on what is left until one block
// is left. A candidate's id is its place in the first round, which has_ids = 0 tells. Grid of threadgroups of
// row_threads: blocks.
kernel void top_k(constant TopKParams& params [[buffer(0)]], device const float* values [[buffer(1)]],
                  device const int* ids [[buffer(2)]], device float* best_values [[buffer(3)]],
                  device int* best_ids [[buffer(4)]], uint block [[threadgroup_position_in_grid]],
                  uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float sorted_values[top_k_block];
  threadgroup uint sorted_ids[top_k_block];
  const uint first = block * top_k_block;
  for (uint i = thread_index; i < top_k_block; i += row_threads) {
    const uint at = first + i;
    sorted_values[i] = at < params.count ? values[at] : 0.0f;
    sorted_ids[i] = at >= params.count ? no_candidate : params.has_ids != 0 ? uint(ids[at]) : at;
  }
  // A bitonic sort: runs of length `run` are sorted, up and down in turn, then runs of twice that length.
  for (uint run = 2; run <= top_k_block; run *= 2)
    for (uint distance = run / 2; distance > 0; distance /= 2) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint pair = thread_index; pair < top_k_block / 2; pair += row_threads) {
        const uint low = pair / distance * distance * 2 + pair % distance, high = low + distance;
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
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // Every block but the last has k of them.
  const uint left = min(params.k, params.count - first);
  for (uint i = thread_index; i < left; i += row_threads) {
    best_values[ulong(block) * params.k + i] = sorted_values[i];
    best_ids[ulong(block) * params.k + i] = int(sorted_ids[i]);
  }
}
