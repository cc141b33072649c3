// The gated delta-net. Every row of a head's state is a recurrence of its own, so a unit carries a few of them through
// all the rows of the task, in the order of the definition: decay, memory read, correction, update, read at the query.

#include "kernels/cpu/delta.h"
#include "kernels/cpu/lanes.h"

namespace moeflux::cpu::MOEFLUX_ISA {

constexpr int64_t conv_channels = 256;  // of a unit
constexpr int64_t gate_numbers = 256;   // of a unit
constexpr int64_t delta_rows = 64;      // of one head's state in a unit: what the first-level cache holds
constexpr int64_t steps_ahead = 2;      // for which numbers are prefetched

// ---- Convolution -----------------------------------------------------------------------------------------------

// Row `row` of the state followed by the input.
MOEFLUX_INLINE const float* conv_input(const ConvTask& task, int64_t row) {
  return row < task.kept() ? task.state + row * task.channels : task.x + (row - task.kept()) * task.channels;
}

// The weights of `lanes` channels, tap by tap, if there are four taps.
MOEFLUX_INLINE void four_taps(const float* weight, Floats (&taps)[4]) {
  const Floats a = load<Floats>(weight), b = load<Floats>(weight + lanes);
  const Floats c = load<Floats>(weight + 2 * lanes), d = load<Floats>(weight + 3 * lanes);
  const Floats even_low = evens(a, b), even_high = evens(c, d), odd_low = odds(a, b), odd_high = odds(c, d);
  taps[0] = evens(even_low, even_high);
  taps[1] = evens(odd_low, odd_high);
  taps[2] = odds(even_low, even_high);
  taps[3] = odds(odd_low, odd_high);
}

// It goes row after row, so that memory is read in runs as long as a unit's channels. Earlier rows are still in the
// cache.
static void conv_four_taps(const ConvTask& task, int64_t begin, int64_t end) {
  float taps[conv_channels / lanes][4][lanes];
  for (int64_t c = begin; c < end; c += lanes) {
    Floats own[4];
    four_taps(task.weight + c * 4, own);
    for (int64_t tap = 0; tap < 4; ++tap) store(taps[(c - begin) / lanes][tap], own[tap]);
  }
  for (int64_t row = 0; row < task.rows; ++row) {
    const float* inputs[4];
    for (int64_t tap = 0; tap < 4; ++tap) inputs[tap] = conv_input(task, row + tap * task.dilation);
    for (int64_t c = begin; c < end; c += lanes) {
      const float (&own)[4][lanes] = taps[(c - begin) / lanes];
      Floats y = load<Floats>(inputs[0] + c) * load<Floats>(own[0]);
      MOEFLUX_UNROLL
      for (int64_t tap = 1; tap < 4; ++tap) y = fma(load<Floats>(inputs[tap] + c), load<Floats>(own[tap]), y);
      store(task.out + row * task.channels + c, silu(y));
    }
  }
}

// `count` channels, at most a vector of them, with any number of taps.
static void conv_any_taps(const ConvTask& task, int64_t channel, int64_t count) {
  for (int64_t row = 0; row < task.rows; ++row) {
    Floats y = {};
    for (int64_t tap = 0; tap < task.taps; ++tap) {
      float weight[lanes] = {};
      for (int64_t i = 0; i < count; ++i) weight[i] = task.weight[(channel + i) * task.taps + tap];
      y = fma(load_part(conv_input(task, row + tap * task.dilation) + channel, count), load<Floats>(weight), y);
    }
    store_some(task.out + row * task.channels + channel, silu(y), count);
  }
}

static int64_t conv1d_units(const ConvTask& task) { return divide_up(task.channels, conv_channels); }

static void conv1d(const ConvTask& task, int64_t unit) {
  const int64_t begin = unit * conv_channels;
  const int64_t end = smaller(begin + conv_channels, task.channels);
  int64_t channel = task.taps == 4 ? begin + (end - begin) / lanes * lanes : begin;
  if (channel > begin) conv_four_taps(task, begin, channel);
  for (; channel < end; channel += lanes) conv_any_taps(task, channel, smaller(lanes, end - channel));
  // Ascending: with fewer rows than the state has, a state row moves up before it is overwritten.
  for (int64_t row = 0; row < task.kept(); ++row)
    __builtin_memmove(task.state + row * task.channels + begin, conv_input(task, task.rows + row) + begin,
                      static_cast<size_t>(end - begin) * sizeof(float));
}

// ---- Gates -----------------------------------------------------------------------------------------------------

// This computes in double, whose range holds the exponentials of all f32 numbers that occur. So zero is never
// multiplied by infinity.
static void delta_gate(const DeltaGatesTask& task, int64_t i) {
  const int64_t head = i % task.heads;
  const double t = static_cast<double>(task.alpha[i]) + static_cast<double>(task.dt_bias[head]);
  const double softplus = t > 30 ? t : __builtin_log1p(__builtin_exp(t));
  task.decay[i] = static_cast<float>(__builtin_exp(-__builtin_exp(static_cast<double>(task.a_log[head])) * softplus));
  task.beta[i] = static_cast<float>(1 / (1 + __builtin_exp(-static_cast<double>(task.b[i]))));
}

static int64_t delta_gates_units(const DeltaGatesTask& task) { return divide_up(task.rows * task.heads, gate_numbers); }

static void delta_gates(const DeltaGatesTask& task, int64_t unit) {
  const int64_t end = smaller((unit + 1) * gate_numbers, task.rows * task.heads);
  for (int64_t i = unit * gate_numbers; i < end; ++i) delta_gate(task, i);
}

// ---- Recurrence ------------------------------------------------------------------------------------------------

// What one row of the task gives to one value head.
struct DeltaStep {
  const float* q;
  const float* k;
  float decay;
  float beta;
};

// The channels after the last whole vector: `rows` sums of state times k.
template <int64_t rows>
MOEFLUX_COLD Floats held_rest(const DeltaStep& step, const float* state, int64_t key_dim) {
  float held[lanes] = {};
  for (int64_t a = 0; a < rows; ++a)
    for (int64_t c = key_dim / lanes * lanes; c < key_dim; ++c) held[a] += state[a * key_dim + c] * step.k[c];
  return load<Floats>(held);
}

// The same channels: their update, and `rows` sums of what is read from them.
template <int64_t rows>
MOEFLUX_COLD Floats update_rest(const DeltaStep& step, const float* corrections, float* state, int64_t key_dim) {
  float reads[lanes] = {};
  for (int64_t a = 0; a < rows; ++a) {
    for (int64_t c = key_dim / lanes * lanes; c < key_dim; ++c) {
      float& place = state[a * key_dim + c];
      place = place * step.decay + corrections[a] * step.k[c];
      reads[a] += place * step.q[c];
    }
  }
  return load<Floats>(reads);
}

// What `rows` state rows hold for k after their decay. Decaying the sum instead of its terms takes fewer
// multiplications.
template <int64_t rows>
MOEFLUX_INLINE Floats held(const DeltaStep& step, const float* state, int64_t key_dim) {
  Floats products[lanes] = {};
  for (int64_t c = 0; c + lanes <= key_dim; c += lanes) {
    const Floats k = load<Floats>(step.k + c);
    MOEFLUX_UNROLL
    for (int64_t a = 0; a < rows; ++a) products[a] = fma(load<Floats>(state + a * key_dim + c), k, products[a]);
  }
  Floats whole = sums<lanes>(products);
  if (key_dim % lanes != 0) whole += held_rest<rows>(step, state, key_dim);
  return whole * splat(step.decay);
}

// Prefetches a cache line of what lies after a tile, and that as far again behind it into the second cache. They may
// lie after the state.
MOEFLUX_INLINE void prefetch_tiles(const float* tile, int64_t numbers, int64_t at) {
  const auto line = reinterpret_cast<uintptr_t>(tile) + static_cast<uintptr_t>((numbers + at) * 4);
  __builtin_prefetch(reinterpret_cast<const void*>(line));
  __builtin_prefetch(reinterpret_cast<const void*>(line + static_cast<uintptr_t>(numbers * 4)), 0, 2);
}

// Decays and corrects `rows` state rows, and reads them at q. If it asks, what follows them in memory comes nearer:
// rows of a tile are too many streams for the hardware to foresee them.
template <int64_t rows, bool asks>
MOEFLUX_INLINE Floats update(const DeltaStep& step, const float* corrections, float* state, int64_t key_dim) {
  const Floats decay = splat(step.decay);
  Floats products[lanes] = {};
  for (int64_t c = 0; c + lanes <= key_dim; c += lanes) {
    const Floats k = load<Floats>(step.k + c), q = load<Floats>(step.q + c);
    MOEFLUX_UNROLL
    for (int64_t a = 0; a < rows; ++a) {
      float* place = state + a * key_dim + c;
      if (asks && a * lanes % 16 == 0) prefetch_tiles(state, rows * key_dim, c * rows + a * lanes);
      const Floats updated = fma(splat(corrections[a]), k, load<Floats>(place) * decay);
      store(place, updated);
      products[a] = fma(updated, q, products[a]);
    }
  }
  const Floats whole = sums<lanes>(products);
  return key_dim % lanes == 0 ? whole : whole + update_rest<rows>(step, corrections, state, key_dim);
}

// One step of `rows` state rows: 1, or as many as a vector has lanes, so that their sums make a vector.
template <int64_t rows, bool asks>
MOEFLUX_INLINE void delta_step(const DeltaStep& step, const float* v, float* state, float* out, int64_t key_dim) {
  const Floats wanted = rows == lanes ? load<Floats>(v) : load_part(v, rows);
  float corrections[lanes];
  store(corrections, (wanted - held<rows>(step, state, key_dim)) * splat(step.beta));
  const Floats read = update<rows, asks>(step, corrections, state, key_dim);
  if constexpr (rows == lanes)
    store(out, read);
  else
    store_some(out, read, rows);
}

MOEFLUX_INLINE void prefetch_numbers(const float* from, int64_t count) {
  for (int64_t c = 0; c < count; c += 16) __builtin_prefetch(from + c);
}

// Prefetches what a unit will read and write at one row of the task. Rows are too far apart for the hardware to foresee
// them.
MOEFLUX_INLINE void prefetch_step(const DeltaTask& task, int64_t row, int64_t head, int64_t key_head, int64_t first,
                                  int64_t last) {
  prefetch_numbers(task.q + row * task.q_row_stride + key_head * task.q_head_stride, task.key_dim);
  prefetch_numbers(task.k + row * task.k_row_stride + key_head * task.k_head_stride, task.key_dim);
  prefetch_numbers(task.v + row * task.v_row_stride + head * task.v_head_stride + first, last - first);
  prefetch_numbers(task.out + (row * task.value_heads + head) * task.value_dim + first, last - first);
}

// Takes state rows first ... last - 1 of one head through every row of the task. `width` is the key dimension, or 0 for
// any. If it is known when compiling, the places of a tile's rows need no registers.
template <int64_t width>
static void delta_recurrence(const DeltaTask& task, int64_t head, int64_t first, int64_t last) {
  const int64_t key_dim = width > 0 ? width : task.key_dim;
  const int64_t key_head = head / task.neighbours % task.key_heads;
  float* state = task.state + head * task.value_dim * key_dim;
  for (int64_t i = 0; i < task.rows; ++i) {
    if (i + steps_ahead < task.rows) prefetch_step(task, i + steps_ahead, head, key_head, first, last);
    DeltaStep step;
    step.q = task.q + i * task.q_row_stride + key_head * task.q_head_stride;
    step.k = task.k + i * task.k_row_stride + key_head * task.k_head_stride;
    step.decay = task.decay[i * task.value_heads + head];
    step.beta = task.beta[i * task.value_heads + head];
    const float* v = task.v + i * task.v_row_stride + head * task.v_head_stride;
    float* out = task.out + (i * task.value_heads + head) * task.value_dim;
    int64_t row = first;
    // Behind the first row of the task the state is in the first cache.
    for (; i == 0 && row + lanes <= last; row += lanes)
      delta_step<lanes, true>(step, v + row, state + row * key_dim, out + row, key_dim);
    for (; row + lanes <= last; row += lanes)
      delta_step<lanes, false>(step, v + row, state + row * key_dim, out + row, key_dim);
    for (; row < last; ++row) delta_step<1, false>(step, v + row, state + row * key_dim, out + row, key_dim);
  }
}

static int64_t gated_delta_units(const DeltaTask& task) {
  return task.value_heads * divide_up(task.value_dim, delta_rows);
}

static void gated_delta(const DeltaTask& task, int64_t unit) {
  const int64_t blocks = divide_up(task.value_dim, delta_rows);
  const int64_t head = unit / blocks;
  const int64_t first = unit % blocks * delta_rows;
  const int64_t last = smaller(first + delta_rows, task.value_dim);
  if (task.key_dim == 128)
    delta_recurrence<128>(task, head, first, last);
  else
    delta_recurrence<0>(task, head, first, last);
}

constexpr DeltaKernels delta_kernels = {conv1d_units,      conv1d,     delta_gates_units, delta_gates,
                                        gated_delta_units, gated_delta};

}  // namespace moeflux::cpu::MOEFLUX_ISA
