// Routers and top-k. Candidates are met in ascending order of their ids, so one that is not strictly better than those
// before it comes after them: the lower id wins a tie.

#include "kernels/cpu/lanes.h"
#include "kernels/cpu/route.h"

namespace moeflux::cpu::MOEFLUX_ISA {

// ---- The few best, in order ------------------------------------------------------------------------------------

// A NaN is worse than every number and as good as another NaN.
MOEFLUX_INLINE bool better(float a, float b) { return a > b || (b != b && a == a); }

// The best so far, in the caller's arrays, best first. It is for the few that a router keeps, because an insertion
// moves all that are worse.
struct BestFew {
  int32_t* ids;
  float* values;
  int64_t room;
  int64_t count;
};

MOEFLUX_INLINE void offer(BestFew& best, int32_t id, float value) {
  if (best.count == best.room && !better(value, best.values[best.room - 1])) return;
  int64_t place = best.count < best.room ? best.count++ : best.room - 1;
  for (; place > 0 && better(value, best.values[place - 1]); --place) {
    best.ids[place] = best.ids[place - 1];
    best.values[place] = best.values[place - 1];
  }
  best.ids[place] = id;
  best.values[place] = value;
}

// ---- Routers ---------------------------------------------------------------------------------------------------

// Divides the weights by their sum, if that is asked for and the sum is above 0. Then multiplies them by the scaling.
MOEFLUX_INLINE void finish_weights(const RouteTask& task, float* weights) {
  float total = 0;
  for (int64_t i = 0; i < task.k; ++i) total += weights[i];
  const float divisor = task.normalize && total > 0 ? total : 1.0f;
  for (int64_t i = 0; i < task.k; ++i) weights[i] = weights[i] / divisor * task.scaling;
}

// Of each group, whether it is among the best.
MOEFLUX_INLINE void keep_best_groups(const RouteTask& task, const float* worths, bool* kept) {
  int32_t ids[max_routed_experts];
  float values[max_routed_experts];
  BestFew best = {ids, values, task.groups_kept, 0};
  for (int64_t group = 0; group < task.groups; ++group) {
    offer(best, static_cast<int32_t>(group), worths[group]);
    kept[group] = false;
  }
  for (int64_t i = 0; i < task.groups_kept; ++i) kept[ids[i]] = true;
}

// Offers the experts of the best groups. A group is worth its best score.
MOEFLUX_INLINE void offer_of_groups(const RouteTask& task, const float* scores, BestFew& best) {
  const int64_t size = task.experts / task.groups;
  float worths[max_routed_experts];
  bool kept[max_routed_experts];
  for (int64_t group = 0; group < task.groups; ++group) {
    worths[group] = scores[group * size];
    for (int64_t i = group * size + 1; i < group * size + size; ++i)
      if (better(scores[i], worths[group])) worths[group] = scores[i];
  }
  keep_best_groups(task, worths, kept);
  for (int64_t i = 0; i < task.experts; ++i)
    if (kept[i / size]) offer(best, static_cast<int32_t>(i), scores[i]);
}

// The weights are probabilities among all experts. The greatest logits have the greatest ones, and the group with the
// greatest is always kept.
static void route_softmax(const RouteTask& task, int64_t row) {
  const float* logits = task.logits + row * task.experts;
  float* weights = task.weights + row * task.k;
  BestFew best = {task.ids + row * task.k, weights, task.k, 0};
  if (task.groups)
    offer_of_groups(task, logits, best);
  else
    for (int64_t i = 0; i < task.experts; ++i) offer(best, static_cast<int32_t>(i), logits[i]);

  const Floats greatest = splat(weights[0]);
  Floats total = {};
  int64_t i = 0;
  for (; i + lanes <= task.experts; i += lanes) total += exp(load<Floats>(logits + i) - greatest);
  float sum_of_all = sum(total);
  for (; i < task.experts; ++i) sum_of_all += exp(splat(logits[i]) - greatest)[0];
  for (int64_t slot = 0; slot < task.k; ++slot) weights[slot] = exp(splat(weights[slot]) - greatest)[0] / sum_of_all;
  finish_weights(task, weights);
  if (!task.factors) return;
  for (int64_t slot = 0; slot < task.k; ++slot) weights[slot] *= task.factors[best.ids[slot]];
}

// The sum of the two best of a group, or the only one of a group of one.
MOEFLUX_INLINE float group_worth(const float* choice, int64_t size) {
  int32_t ids[2];
  float values[2];
  BestFew best = {ids, values, smaller(size, 2), 0};
  for (int64_t i = 0; i < size; ++i) offer(best, 0, choice[i]);
  return size == 1 ? values[0] : values[0] + values[1];
}

// noaux_tc: the bias helps to choose, and has no part in the weights.
static void route_grouped(const RouteTask& task, int64_t row) {
  const float* logits = task.logits + row * task.experts;
  int32_t* ids = task.ids + row * task.k;
  float* weights = task.weights + row * task.k;
  const int64_t size = task.experts / task.groups;

  float choice[max_routed_experts];
  int64_t whole = 0;
  for (; whole + lanes <= task.experts; whole += lanes)
    store(choice + whole, sigmoid(load<Floats>(logits + whole)) + load<Floats>(task.bias + whole));
  for (int64_t i = whole; i < task.experts; ++i) choice[i] = sigmoid(splat(logits[i]))[0] + task.bias[i];

  float worths[max_routed_experts];
  bool kept[max_routed_experts];
  for (int64_t group = 0; group < task.groups; ++group) worths[group] = group_worth(choice + group * size, size);
  keep_best_groups(task, worths, kept);

  BestFew best = {ids, weights, task.k, 0};
  for (int64_t i = 0; i < task.experts; ++i)
    if (kept[i / size]) offer(best, static_cast<int32_t>(i), choice[i]);
  for (int64_t slot = 0; slot < task.k; ++slot) weights[slot] = sigmoid(splat(logits[ids[slot]]))[0];
  finish_weights(task, weights);
}

// ---- Top-k of a vocabulary -------------------------------------------------------------------------------------

constexpr int64_t top_k_block = 16384;  // logits of a unit

MOEFLUX_INLINE bool comes_before(const Candidate& a, const Candidate& b) {
  return better(a.value, b.value) || (a.id < b.id && !better(b.value, a.value));
}

// The root of the heap is the worst that is still among the best. This restores the heap below `place`.
MOEFLUX_INLINE void sink(Candidate* heap, int64_t count, int64_t place) {
  const Candidate moved = heap[place];
  for (int64_t child = 2 * place + 1; child < count; child = 2 * place + 1) {
    if (child + 1 < count && comes_before(heap[child], heap[child + 1])) ++child;
    if (!comes_before(moved, heap[child])) break;
    heap[place] = heap[child];
    place = child;
  }
  heap[place] = moved;
}

MOEFLUX_INLINE bool any_lane(Ints value) {
  int32_t parts[lanes];
  __builtin_memcpy(parts, &value, sizeof parts);
  int32_t any = 0;
  for (int64_t i = 0; i < lanes; ++i) any |= parts[i];
  return any != 0;
}

MOEFLUX_INLINE void replace_root(Candidate* heap, int64_t count, float value, int64_t id) {
  if (!better(value, heap[0].value)) return;
  heap[0].value = value;
  heap[0].id = static_cast<int32_t>(id);
  sink(heap, count, 0);
}

// The best `k` of logits begin ... end, best first.
static void best_of_block(const float* logits, int64_t begin, int64_t end, int64_t k, Candidate* heap) {
  int64_t i = begin;
  for (; i < begin + k; ++i) {
    heap[i - begin].value = logits[i];
    heap[i - begin].id = static_cast<int32_t>(i);
  }
  for (int64_t place = k / 2 - 1; place >= 0; --place) sink(heap, k, place);
  for (; i + lanes <= end; i += lanes) {
    // Not "greater": a NaN at the root lets every number through.
    const Floats worst = splat(heap[0].value);
    if (any_lane(~(load<Floats>(logits + i) <= worst)))
      for (int64_t lane = 0; lane < lanes; ++lane) replace_root(heap, k, logits[i + lane], i + lane);
  }
  for (; i < end; ++i) replace_root(heap, k, logits[i], i);
  for (int64_t count = k - 1; count > 0; --count) {
    const Candidate worst = heap[0];
    heap[0] = heap[count];
    heap[count] = worst;
    sink(heap, count, 0);
  }
}

static int64_t top_k_units(const TopKTask& task) { return divide_up(task.count, top_k_block); }

// How many entries a unit has in the scratch: its best, sorted, and then a cursor of the merge.
static int64_t unit_candidates(const TopKTask& task) { return smaller(task.k, top_k_block) + 1; }

static int64_t top_k_scratch(const TopKTask& task) { return top_k_units(task) * unit_candidates(task); }

// How many candidates a unit has.
MOEFLUX_INLINE int64_t unit_count(const TopKTask& task, int64_t unit) {
  return smaller(task.k, smaller(top_k_block, task.count - unit * top_k_block));
}

static void top_k(const TopKTask& task, int64_t unit) {
  const int64_t begin = unit * top_k_block;
  const int64_t end = smaller(begin + top_k_block, task.count);
  best_of_block(task.logits, begin, end, unit_count(task, unit), task.scratch + unit * unit_candidates(task));
}

static void top_k_merge(const TopKTask& task) {
  const int64_t units = top_k_units(task);
  const int64_t stride = unit_candidates(task);
  Candidate* cursors = task.scratch + stride - 1;
  for (int64_t unit = 0; unit < units; ++unit) cursors[unit * stride].id = 0;
  for (int64_t place = 0; place < task.k; ++place) {
    int64_t from = -1;
    const Candidate* best = nullptr;
    for (int64_t unit = 0; unit < units; ++unit) {
      const int32_t cursor = cursors[unit * stride].id;
      if (cursor == unit_count(task, unit)) continue;
      const Candidate* candidate = task.scratch + unit * stride + cursor;
      if (best && !comes_before(*candidate, *best)) continue;
      best = candidate;
      from = unit;
    }
    ++cursors[from * stride].id;
    task.ids[place] = best->id;
    task.values[place] = best->value;
  }
}

constexpr RouteKernels route_kernels = {route_softmax, route_grouped, top_k_scratch, top_k_units, top_k, top_k_merge};

}  // namespace moeflux::cpu::MOEFLUX_ISA
