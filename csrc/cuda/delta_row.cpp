// The delta-net of one row: what goes together before it and behind it.
#include <algorithm>
#include <cstring>
#include <utility>

#include "cuda/cuda_commands.h"

namespace moeflux::cuda {

// Whether they are what the recurrence of one row is for, which then makes them: every block of a head those of it.
static bool are_of(const DeltaGatesParams& gates, const DeltaParams& delta) {
  if (gates.decay != delta.decay || gates.beta != delta.beta || gates.count != delta.value_heads) return false;
  for (const float* read : {gates.alpha, gates.b})
    if (meet(read, gates.count, delta.out, int64_t{delta.value_heads} * delta.value_dim) ||
        meet(read, gates.count, gates.decay, gates.count) || meet(read, gates.count, gates.beta, gates.count))
      return false;
  return true;
}

// ---- Before it ------------------------------------------------------------------------------------------------------

// The norms of queries, then of keys, that a convolution behind products makes: first and second in its row.
bool CudaCommands::takes_convolved_norm(const HeadParams& norm) {
  if (norm.weight || norm.head_stride != norm.dim || norm.dim > max_key_dim) return false;
  const uint32_t width = norm.heads * norm.dim;
  if (auto* inputs = std::get_if<DeltaInputs>(&waiting_)) {
    const HeadParams& q = inputs->q;
    if (inputs->k || norm.x != q.x + width || norm.heads != q.heads || norm.dim != q.dim) return false;
    inputs->k = norm;
    return true;
  }
  auto* products = std::get_if<RowProduct>(&waiting_);
  if (!products || !products->params.taps || norm.x != products->params.convolved ||
      2 * int64_t{width} > products->params.rows[0])
    return false;
  waiting_ = DeltaInputs{std::move(*products), norm, {}, {}};
  return true;
}

bool CudaCommands::takes_row_gates(const DeltaGatesParams& gates) {
  auto* inputs = std::get_if<DeltaInputs>(&waiting_);
  if (!inputs || !inputs->k || inputs->gates) return false;
  inputs->gates = gates;
  return true;
}

// What has come, one by one.
void CudaCommands::launch_inputs(const DeltaInputs& inputs) {
  launch_row(inputs.products);
  by_heads("rms_norm_heads", inputs.q, inputs.q.heads);
  if (inputs.k) by_heads("rms_norm_heads", *inputs.k, inputs.k->heads);
  if (inputs.gates) flat("delta_gates", *inputs.gates, inputs.gates->count);
}

// Every block makes the norms of its head, so the convolution leaves what they are of in a room of its own.
bool CudaCommands::takes_inputs(DeltaParams& delta) {
  const auto* inputs = std::get_if<DeltaInputs>(&waiting_);
  if (!inputs || !inputs->k || !inputs->gates) return false;
  const HeadParams &q = inputs->q, &k = *inputs->k;
  const DeltaGatesParams& gates = *inputs->gates;
  const OneRowParams& made = inputs->products.params;
  const int64_t channels = made.rows[0], keys = int64_t{q.heads} * q.dim;
  const int64_t values = int64_t{delta.value_heads} * delta.value_dim;
  const bool lie_so = delta.q == q.x && delta.k == k.x && delta.v == q.x + 2 * keys && channels == 2 * keys + values &&
                      delta.key_heads == q.heads && delta.key_dim == q.dim && delta.q_head_stride == q.dim &&
                      delta.k_head_stride == q.dim && delta.v_head_stride == delta.value_dim;
  if (!lie_so || !are_of(gates, delta) || meet(gates.alpha, gates.count, q.x, channels) ||
      meet(gates.b, gates.count, q.x, channels) || 4 * channels > launches_.room_limit(convolved_before_norm))
    return false;
  RowProduct products = inputs->products;
  delta.gates = gates;
  delta.q_kept = q.x;
  delta.k_kept = k.x;
  delta.v_kept = q.x + 2 * keys;
  delta.q_eps = q.eps;
  delta.k_eps = k.eps;
  delta.q_scale = q.scale;
  delta.k_scale = k.scale;
  waiting_ = std::monostate();
  auto* before = room<float>(convolved_before_norm, 4 * channels);
  products.params.convolved = before;
  launch_row(products);
  delta.q = before;
  delta.k = before + keys;
  delta.v = before + 2 * keys;
  return true;
}

bool CudaCommands::takes_gates(DeltaParams& delta) {
  const auto* gates = std::get_if<DeltaGatesParams>(&waiting_);
  if (!gates || !are_of(*gates, delta)) return false;
  delta.gates = *gates;
  waiting_ = std::monostate();
  return true;
}

// ---- Of some rows, each of another session --------------------------------------------------------------------------

// The norms of queries, then of keys, behind the convolution of all these rows: first and second in its row.
bool CudaCommands::takes_norm_of_convolved(const HeadParams& norm) {
  auto* waiting = std::get_if<Convolved>(&waiting_);
  if (!waiting || waiting->k || waiting->sessions.size() != norm.n) return false;
  const ConvParams& conv = waiting->params;
  const int64_t width = int64_t{norm.heads} * norm.dim;
  if (conv.taps != 4 || conv.dilation != 1 || !is_aligned(conv.weight) || norm.weight || norm.head_stride != norm.dim ||
      norm.row_stride != conv.channels || norm.dim % lanes != 0 || norm.dim > max_key_dim ||
      conv.channels % norm.dim != 0 || 2 * width > conv.channels)
    return false;
  std::optional<HeadParams>& own = waiting->q ? waiting->k : waiting->q;
  if (waiting->q && (norm.x != waiting->q->x + width || norm.dim != waiting->q->dim)) return false;
  if (!waiting->q && norm.x != conv.out) return false;
  own = norm;
  return true;
}

// With the gates it is all there. What follows may go with it.
bool CudaCommands::takes_gates_of_convolved(const DeltaGatesParams& gates) {
  const auto* waiting = std::get_if<Convolved>(&waiting_);
  if (!waiting || !waiting->k || gates.count != gates.heads * waiting->sessions.size()) return false;
  const HeadParams &q = *waiting->q, &k = *waiting->k;
  const auto n = static_cast<uint32_t>(waiting->sessions.size());
  const int64_t count = int64_t{n} * waiting->params.channels;
  for (const float* row : {static_cast<const float*>(waiting->params.out), waiting->params.x})
    for (const float* at :
         {gates.alpha, gates.b, static_cast<const float*>(gates.decay), static_cast<const float*>(gates.beta)})
      if (meet(row, count, at, gates.count)) return false;
  DeltaInputsParams params = {.conv = waiting->params,
                              .gates = gates,
                              .dim = q.dim,
                              .key_heads = q.heads,
                              .q_eps = q.eps,
                              .k_eps = k.eps,
                              .q_scale = q.scale,
                              .k_scale = k.scale};
  params.conv.sessions = list_of(waiting->sessions);
  waiting_ = DeltaStep{params, n};
  return true;
}

void CudaCommands::launch_convolved(const Convolved& convolved) {
  ConvParams params = convolved.params;
  params.sessions = list_of(convolved.sessions);
  flat("conv1d_few", params, params.channels, 1, std::ssize(convolved.sessions));
  for (const std::optional<HeadParams>& norm : {convolved.q, convolved.k})
    if (norm) by_heads("rms_norm_heads", *norm, int64_t{norm->heads} * norm->n);
}

// The recurrence of the next of these sessions, if its heads are as the kernel for all of it has them: a block has a
// value head, and two of them share a key head.
bool CudaCommands::takes_step_delta(const std::string& kernel, Extent grid, const DeltaParams& params) {
  auto* step = std::get_if<DeltaStep>(&waiting_);
  if (!step || step->heads || step->states.size() == step->n) return false;
  const DeltaInputsParams& inputs = step->inputs;
  const ConvParams& conv = inputs.conv;
  if (step->states.empty()) {
    const int64_t n = step->n, keys = int64_t{inputs.key_heads} * inputs.dim;
    const int64_t values = int64_t{params.value_heads} * params.value_dim;
    const bool lies_so = inputs.dim == part_columns && params.key_dim == inputs.dim && params.value_dim == inputs.dim &&
                         params.key_heads == inputs.key_heads && params.value_heads == 2 * inputs.key_heads &&
                         conv.channels == 2 * keys + values && params.q == conv.out && params.k == conv.out + keys &&
                         params.v == conv.out + 2 * keys && params.q_row_stride == conv.channels &&
                         params.k_row_stride == conv.channels && params.v_row_stride == conv.channels &&
                         params.q_head_stride == inputs.dim && params.k_head_stride == inputs.dim &&
                         params.v_head_stride == inputs.dim && params.decay == inputs.gates.decay &&
                         params.beta == inputs.gates.beta && inputs.gates.heads == params.value_heads;
    const auto meets = [&](const float* out, int64_t count) {
      return meet(out, count, conv.x, n * conv.channels) || meet(out, count, inputs.gates.alpha, inputs.gates.count) ||
             meet(out, count, inputs.gates.b, inputs.gates.count);
    };
    if (n > int64_t{many_rows} || !launches_.chip().has(9) || !lies_so || meets(conv.out, n * conv.channels) ||
        meets(params.out, n * values))
      return false;
    step->kernel = kernel;
    step->grid = grid;
    step->delta = params;
  } else {
    const DeltaParams next = delta_behind(step->delta, step->states.size(), params.state);
    if (std::memcmp(&next, &params, sizeof next) != 0) return false;
  }
  if (!is_aligned(params.state) || std::ranges::find(step->states, params.state) != step->states.end()) return false;
  step->states.push_back(params.state);
  return true;
}

// The gated norms of its heads.
bool CudaCommands::takes_step_heads(const HeadParams& heads) {
  auto* step = std::get_if<DeltaStep>(&waiting_);
  if (!step || step->heads || step->states.size() != step->n) return false;
  const DeltaParams& delta = step->delta;
  const ConvParams& conv = step->inputs.conv;
  const DeltaGatesParams& gates = step->inputs.gates;
  const int64_t n = step->n, count = n * heads.gate_row_stride;
  if (heads.x != delta.out || heads.n != n || heads.heads != delta.value_heads || heads.dim != delta.value_dim ||
      heads.head_stride != heads.dim || heads.row_stride != heads.heads * heads.dim ||
      meet(heads.gate, count, heads.x, n * heads.row_stride) || meet(heads.gate, count, conv.out, n * conv.channels) ||
      meet(heads.gate, count, gates.decay, gates.count) || meet(heads.gate, count, gates.beta, gates.count))
    return false;
  step->heads = heads;
  return true;
}

void CudaCommands::launch_step(const DeltaStep& step, const DigitRoom& to) {
  launch("delta_step", {step.delta.value_heads * step.n}, step_threads,
         DeltaStepParams{.inputs = step.inputs,
                         .states = list_of(step.states),
                         .heads = *step.heads,
                         .to = to,
                         .neighbours = step.delta.neighbours,
                         .has_room = step.delta.has_room});
}

// What has come, without the digits of its heads.
void CudaCommands::launch_step_apart(const DeltaStep& step) {
  const DeltaInputsParams& inputs = step.inputs;
  const auto sessions = static_cast<uint32_t>(step.states.size());
  launch("delta_inputs", {divide_up(inputs.conv.channels / inputs.dim, head_warps) + 1, step.n}, head_warps * lanes,
         inputs);
  if (sessions > 0) {
    DeltaParams params = step.delta;
    params.sessions = list_of(step.states);
    launch(step.kernel, {step.grid.x, step.grid.y, sessions}, delta_warps * lanes, params);
  }
  if (step.heads) by_heads("gated_rms_norm", *step.heads, int64_t{step.heads->heads} * step.heads->n);
}

// ---- Behind it ------------------------------------------------------------------------------------------------------

void CudaCommands::launch_delta(const DeltaRow& delta, float* out) {
  DeltaParams params = delta.params;
  params.out = out;
  launch(delta.kernel, delta.grid, delta_warps * lanes, params);
}

// What the recurrence of one row makes, and the norm and gate of each of its heads.
bool CudaCommands::takes_gated_norm(const HeadParams& params) {
  auto* waiting = std::get_if<DeltaRow>(&waiting_);
  if (!waiting || waiting->sessions.size() != 1 || waiting->gate) return false;
  const DeltaParams& delta = waiting->params;
  if (delta.out != params.x || delta.value_heads != params.heads || delta.value_dim != params.dim ||
      params.head_stride != params.dim)
    return false;
  waiting->gate = params;
  return true;
}

// The product of such heads, if each is a part of the columns: every block makes the norms, so the recurrence leaves
// what they are of in a room of its own.
bool CudaCommands::takes_heads(RowProduct& product) {
  auto* waiting = std::get_if<DeltaRow>(&waiting_);
  OneRowParams& params = product.params;
  if (!waiting || !waiting->gate || !product.is_copied || product.count != 1 || params.weight) return false;
  const HeadParams& gate = *waiting->gate;
  const int64_t count = int64_t{gate.heads} * gate.dim;
  if (params.x != gate.x || gate.dim != part_columns || gate.gate_head_stride != part_columns ||
      params.columns != count || !copied_room(params.columns, params.bits[0], divide_up(params.rows[0], tile_rows)) ||
      meet(params.out[0], params.rows[0], gate.gate, count) || 4 * count > launches_.room_limit(heads_before_norm))
    return false;
  const DeltaRow delta = std::move(*waiting);
  waiting_ = std::monostate();
  auto* before = room<float>(heads_before_norm, 4 * count);
  launch_delta(delta, before);
  params.x = before;
  params.normed = gate.x;
  params.z = delta.gate->gate;
  params.heads = delta.gate->weight;
  params.eps = delta.gate->eps;
  waiting_ = product;
  return true;
}

}  // namespace moeflux::cuda
