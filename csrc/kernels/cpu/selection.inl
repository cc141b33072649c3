// Scores of an index, in f32, and the choice of the best.
//
// The heads of a row go through the keys in tiles, as queries of attention do. Their scores are added head by head, a
// key a lane.
#include "kernels/cpu/attention_spans.inl"
#include "kernels/cpu/selection.h"

namespace moeflux::cpu::MOEFLUX_ISA {

// ---- Scores ----------------------------------------------------------------------------------------------------

static int64_t keys_seen(const IndexTask& task, int64_t row) { return (task.first_position + row + 1) / task.unit; }

static int64_t key_blocks(const IndexTask& task) { return divide_up(keys_seen(task, task.rows - 1), task.block_keys); }

static int64_t index_score_units(const IndexTask& task) { return task.rows * key_blocks(task); }

// totals[key] += weight * relu(scores[key]), for as many keys as there are, in whole vectors. Codes have scales.
template <typename Element>
MOEFLUX_INLINE void add_head(const float* scores, const uint16_t* scales, int64_t keys, float weight, float* totals) {
  for (int64_t i = 0; i < keys; i += lanes) {
    Floats score = load<Floats>(scores + i);
    if constexpr (ScalesOf<Element>::are_there)
      score *= keys - i < lanes ? load_part(scales + i, keys - i) : load_row(scales + i);
    const Floats positive = score < 0.0f ? Floats{} : score;  // so that NaN stays
    store(totals + i, fma(positive, splat(weight), load<Floats>(totals + i)));
  }
}

// The scores of `heads` heads from `head` on at keys begin ... begin + keys - 1, at most key_block.
template <int64_t heads, typename Element>
static void add_heads(const float* const* q, const CachedRows<Element>& k, const uint16_t* scales, int64_t begin,
                      int64_t keys, float scale, const float* weights, float* totals) {
  constexpr int64_t together = tile_scores / heads;
  float scores[heads * key_block] = {};
  int64_t key = 0;
  for (; key + together <= keys; key += together) score_part<heads, together>(q, k, begin + key, scale, scores + key);
  for (; key < keys; ++key) score_part<heads, 1>(q, k, begin + key, scale, scores + key);
  for (int64_t i = 0; i < heads; ++i)
    add_head<Element>(scores + i * key_block, scales, keys, weights ? weights[i] : 1.0f, totals);
}

template <typename Element>
static void score_block(const IndexTask& task, int64_t row, int64_t block) {
  const int64_t first = block * task.block_keys;
  const int64_t end = smaller(keys_seen(task, row) - first, task.block_keys);
  CachedRows<Element> k = {task.blocks, task.keys_offset, task.dim, task.dim};
  k.enter(block);
  RowScales scales = {task.blocks,
                      task.keys_offset + task.block_keys * task.dim * static_cast<int64_t>(sizeof(Element))};
  scales.enter(block);
  const float* from = task.q + row * task.q_row_stride;
  const float* weights = task.weights ? task.weights + row * task.heads : nullptr;
  for (int64_t begin = 0; begin < end; begin += key_block) {
    const int64_t keys = smaller(key_block, end - begin);
    float totals[key_block] = {};
    const auto add = [&]<int64_t heads>(int64_t head) __attribute__((always_inline)) {
      const float* q[heads];
      for (int64_t i = 0; i < heads; ++i) q[i] = from + (head + i) * task.q_head_stride;
      add_heads<heads>(q, k, scales.first + begin, begin, keys, task.scale, weights ? weights + head : nullptr, totals);
    };
    int64_t head = 0;
    for (; head + tile_queries <= task.heads; head += tile_queries) add.template operator()<tile_queries>(head);
    for (; head < task.heads; ++head) add.template operator()<1>(head);
    __builtin_memcpy(task.scores + row * task.stride + first + begin, totals,
                     static_cast<size_t>(keys) * sizeof(float));
  }
}

static void index_score(const IndexTask& task, int64_t work) {
  const int64_t blocks = key_blocks(task);
  const int64_t row = work / blocks;
  const int64_t block = work % blocks;
  if (block * task.block_keys >= keys_seen(task, row)) return;
  if (task.kind == Rows::codes)
    score_block<int8_t>(task, row, block);
  else if (task.kind == Rows::bf16)
    score_block<uint16_t>(task, row, block);
  else
    score_block<float>(task, row, block);
}

// ---- The best --------------------------------------------------------------------------------------------------

constexpr int64_t digit_bits = 11;
constexpr int64_t digits = int64_t{1} << digit_bits;

// Whole numbers in the order of the scores. Both zeros are one, and NaN is the least.
MOEFLUX_INLINE uint32_t rank_of(float score) {
  score += 0.0f;
  uint32_t bits;
  __builtin_memcpy(&bits, &score, sizeof bits);
  const uint32_t rank = bits >> 31 ? ~bits : bits | 0x80000000u;
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0 : rank;
}

// The rank of the last that is selected is found digit by digit, from the highest on. `left`: how many of that rank are
// selected.
static uint32_t last_rank(const float* scores, int64_t seen, int64_t count, int64_t& left) {
  uint32_t rank = 0;
  uint32_t known = 0;  // the bits of it that were found
  left = count;
  for (int64_t shift = 32; shift > 0;) {
    const int64_t bits = smaller(shift, digit_bits);
    shift -= bits;
    int32_t counts[digits] = {};
    const uint32_t mask = (uint32_t{1} << bits) - 1;
    for (int64_t i = 0; i < seen; ++i) {
      const uint32_t each = rank_of(scores[i]);
      if ((each & known) == rank) ++counts[each >> shift & mask];
    }
    auto digit = static_cast<int64_t>(mask);
    for (; counts[digit] < left; --digit) left -= counts[digit];
    rank |= static_cast<uint32_t>(digit) << shift;
    known |= mask << shift;
  }
  return rank;
}

static void index_select(const float* scores, int64_t seen, int64_t count, int32_t* ids) {
  int64_t left;
  const uint32_t last = last_rank(scores, seen, count, left);
  int64_t taken = 0;
  for (int64_t i = 0; taken < count; ++i) {
    const uint32_t rank = rank_of(scores[i]);
    if (rank < last || (rank == last && left-- <= 0)) continue;
    ids[taken++] = static_cast<int32_t>(i);
  }
}

constexpr SelectionKernels selection_kernels{index_score_units, index_score, index_select};

}  // namespace moeflux::cpu::MOEFLUX_ISA
