// Which ops go together with the launch that waits, and that launch.
#include <algorithm>
#include <cstring>
#include <utility>

#include "cuda/cuda_commands.h"

namespace moeflux::cuda {
void CudaCommands::mark() {
  launches_.attempt([&] { finish(); });
  launches_.mark();
}

int64_t CudaCommands::hold() {
  launches_.attempt([&] { finish(); });
  return launches_.hold();
}

void CudaCommands::after(const Ticket& copy) {
  launches_.attempt([&] { finish(); });
  launches_.after(copy);
}

void CudaCommands::end() {
  launches_.attempt([&] { finish(); });
}

void CudaCommands::finish() {
  const auto waiting = std::exchange(waiting_, std::monostate());
  if (const auto* norm = std::get_if<NormParams>(&waiting)) launch("rms_norm", {1}, row_threads, *norm);
  if (const auto* product = std::get_if<RowProduct>(&waiting)) launch_row(*product);
  if (const auto* forward = std::get_if<FeedForward>(&waiting)) {
    launch_row(forward->products);
    launch_choice(1, forward->route);
    if (forward->down) launch_row(*forward->down);
  }
  if (const auto* outputs = std::get_if<ExpertOutputs>(&waiting)) launch_outputs(*outputs);
  if (const auto* gates = std::get_if<DeltaGatesParams>(&waiting)) flat("delta_gates", *gates, gates->count);
  if (const auto* inputs = std::get_if<DeltaInputs>(&waiting)) launch_inputs(*inputs);
  if (const auto* output = std::get_if<AttentionOutput>(&waiting)) launch_attention(*output);
  if (const auto* heads = std::get_if<HeadsRow>(&waiting)) launch_heads(*heads);
  if (const auto* appended = std::get_if<Appended>(&waiting)) {
    AppendParams params = appended->params;
    params.sessions = list_of(appended->sessions);
    params.n = static_cast<uint32_t>(appended->sessions.size());
    append_rows(appended->kernel, params);
  }
  if (const auto* sum = std::get_if<RowsSum>(&waiting))
    flat("combine", sum->params, int64_t{sum->params.hidden} * sum->params.n);
  if (const auto* norm = std::get_if<RowsNorm>(&waiting)) launch_rows_norm(*norm);
  if (const auto* heads = std::get_if<RowsHeads>(&waiting))
    by_heads("gated_rms_norm", heads->params, int64_t{heads->params.heads} * heads->params.n);
  if (const auto* added = std::get_if<RowsAdded>(&waiting))
    flat("residual_add", added->params, static_cast<int64_t>(added->params.count));
  if (const auto* gated = std::get_if<RowsGated>(&waiting))
    flat("swiglu", gated->params, static_cast<int64_t>(gated->params.count));
  if (const auto* product = std::get_if<RowsProduct>(&waiting)) launch_rows(*product);
  if (const auto* forward = std::get_if<RowsForward>(&waiting)) launch_rows_forward(*forward);
  if (const auto* convolved = std::get_if<Convolved>(&waiting)) launch_convolved(*convolved);
  if (const auto* copies = std::get_if<Copies>(&waiting)) launch_copies(*copies);
  if (const auto* surveys = std::get_if<Surveys>(&waiting)) launch_surveys(*surveys);
  if (const auto* rows = std::get_if<RowsAppended>(&waiting)) launch_rows_appended(*rows);
  if (const auto* step = std::get_if<DeltaStep>(&waiting)) launch_step_apart(*step);
  if (const auto* delta = std::get_if<DeltaRow>(&waiting)) {
    DeltaParams params = delta->params;
    params.sessions = list_of(delta->sessions);
    const auto sessions = static_cast<uint32_t>(delta->sessions.size());
    if (sessions == 1) {
      launch_delta(*delta, params.out);
      if (delta->gate) by_heads("gated_rms_norm", *delta->gate, delta->gate->heads);
      return;
    }
    launch(delta->kernel, {delta->grid.x, delta->grid.y, sessions}, delta_warps * lanes, params);
  }
}

// ---- Rows of several sessions ---------------------------------------------------------------------------------------
//
// In a step of several sessions each has a row. What ops do with these rows one after the other is one launch, if the
// rows lie as those of one call do and no session comes twice.

namespace {

template <typename Params>
bool same(const Params& a, const Params& b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

template <typename T>
bool has(const std::vector<T>& sessions, T session) {
  return std::ranges::find(sessions, session) != sessions.end();
}

}  // namespace

bool CudaCommands::takes_append(const std::string& kernel, const AppendParams& params) {
  auto* waiting = std::get_if<Appended>(&waiting_);
  if (!waiting || waiting->kernel != kernel) return false;
  AppendParams next = waiting->params;
  next.x += waiting->sessions.size() * next.x_stride;
  next.rows = params.rows;
  if (!same(next, params) || has(waiting->sessions, params.rows)) return false;
  waiting->sessions.push_back(params.rows);
  return true;
}

bool CudaCommands::takes_attention(const AttentionOutput& other) {
  auto* waiting = std::get_if<AttentionOutput>(&waiting_);
  if (!waiting || waiting->kind != other.kind || waiting->params.n != 1 || waiting->params.part_count == 0 ||
      other.params.part_count == 0)
    return false;
  const auto count = static_cast<int64_t>(waiting->sessions.size());
  AttentionParams next = waiting->params;
  next.q += count * next.q_row_stride;
  if (next.q_pe) next.q_pe += count * next.q_pe_row_stride;
  next.out += count * next.heads * next.dim;
  next.rows = other.params.rows;
  next.part_count = other.params.part_count;
  const uint32_t most = std::max(waiting->params.part_count, other.params.part_count);
  const int64_t parts_of_each = are_spans(*waiting, count + 1, most) ? spans_of(most) : most;
  if (!same(next, other.params) || (count + 1) * parts_of_each > most_parts_of_row(next.heads, next.dim)) return false;
  waiting->params.part_count = most;
  waiting->sessions.push_back(next.rows);
  return true;
}

bool CudaCommands::takes_convolution(const ConvParams& params) {
  auto* waiting = std::get_if<Convolved>(&waiting_);
  if (!waiting || has(waiting->sessions, params.state)) return false;
  const size_t before = waiting->sessions.size() * params.channels;
  ConvParams next = waiting->params;
  next.x += before;
  next.out += before;
  next.state = params.state;
  if (!same(next, params)) return false;
  waiting->sessions.push_back(params.state);
  return true;
}

bool CudaCommands::takes_delta(const std::string& kernel, const DeltaParams& params) {
  auto* waiting = std::get_if<DeltaRow>(&waiting_);
  if (!waiting || waiting->kernel != kernel || has(waiting->sessions, params.state)) return false;
  if (waiting->gate) return false;
  if (!same(delta_behind(waiting->params, waiting->sessions.size(), params.state), params)) return false;
  waiting->sessions.push_back(params.state);
  return true;
}

// ---- A row ----------------------------------------------------------------------------------------------------------

// Blocks of as many tiles each, all of them on the chip at once. A few tiles are done by larger blocks.
void CudaCommands::launch_row(const RowProduct& product) {
  OneRowParams params = product.params;
  for (size_t i = 0; i < product.count; ++i) {
    params.first_tile[i] = params.tiles;
    const bool is_second = i > 0 && i - 1 == params.gated;  // its rows are in the tiles of the first
    if (!is_second) params.tiles += divide_up(params.rows[i], i == params.gated ? tile_rows / 2 : tile_rows);
  }
  for (size_t i = product.count; i < most_outputs; ++i) params.first_tile[i] = params.tiles;
  if (product.is_copied && launch_copied(product, params)) return;
  const uint32_t processors = launches_.chip().multiprocessors;
  const uint32_t tiles_of_block = tiles_together(params.tiles);
  const uint32_t warps = params.tiles <= 2 * processors ? one_warps : product_warps;
  launch(product.kernel, {divide_up(params.tiles, tiles_of_block)},
         lanes * std::min(warps, divide_up(params.columns, part_columns)), params);
}

// The products of a row that a norm makes. Every block makes the norm, so nobody may write what the norm reads.
bool CudaCommands::takes_norm(OneRowParams& params, std::span<const Product> products) {
  const auto* norm = std::get_if<NormParams>(&waiting_);
  if (!norm || norm->out != params.x || norm->width != params.columns) return false;
  for (const Product& product : products)
    if (meet(address<const float>(product.out), product.matrix.rows, norm->x, norm->width)) return false;
  params.x = norm->x;
  params.weight = norm->weight;
  params.normed = norm->out;
  params.eps = norm->eps;
  waiting_ = std::monostate();
  return true;
}

// Two products, of which SwiGLU takes both outputs.
bool CudaCommands::takes_swiglu(View gate, View up, int64_t count) {
  RowProduct* product = waiting_products();
  if (!product || product->count < 2 || product->params.gated != no_output || product->params.taps) return false;
  OneRowParams& params = product->params;
  const size_t last = product->count - 1;
  if (params.out[last - 1] != address<float>(gate) || params.out[last] != address<float>(up) ||
      params.rows[last - 1] != count || params.rows[last] != count)
    return false;
  params.gated = static_cast<uint32_t>(last - 1);
  return true;
}

// A product whose output is added to a row that it does not read.
bool CudaCommands::takes_residual(View x, View y, int64_t count) {
  auto* product = std::get_if<RowProduct>(&waiting_);
  if (!product || product->count != 1 || product->params.residual || product->params.taps) return false;
  OneRowParams& params = product->params;
  auto* residual = address<float>(x);
  if (params.out[0] != address<float>(y) || params.rows[0] != count ||
      meet(residual, count, params.x, params.columns) ||
      (params.z && meet(residual, count, params.z, params.columns)) ||
      (params.normed && meet(residual, count, params.normed, params.columns)))
    return false;
  params.residual = residual;
  return true;
}

// Products, and the convolution of the first. Each of its channels is where the output is.
bool CudaCommands::takes_taps(const ConvParams& conv) {
  auto* product = std::get_if<RowProduct>(&waiting_);
  if (!product || conv.n != 1 || conv.taps != 4 || conv.dilation != 1) return false;
  OneRowParams& params = product->params;
  if (params.taps || params.residual || params.gated != no_output || params.out[0] != conv.x ||
      params.rows[0] != conv.channels || meet(conv.out, conv.channels, params.x, params.columns) ||
      (params.normed && meet(conv.out, conv.channels, params.normed, params.columns)))
    return false;
  params.taps = conv.weight;
  params.tap_rows = conv.state;
  params.convolved = conv.out;
  return true;
}

// The output of attention, and its gate.
bool CudaCommands::takes_gate(const Heads& x, const Heads& gate, int64_t n) {
  auto* waiting = std::get_if<AttentionOutput>(&waiting_);
  if (!waiting || waiting->params.gate) return false;
  AttentionParams& params = waiting->params;
  const auto rows = static_cast<int64_t>(params.n * waiting->sessions.size());
  if (params.out != address<float>(x.view) || rows != n || params.heads != x.heads || params.dim != x.dim ||
      x.head_stride != x.dim || x.row_stride != x.heads * x.dim)
    return false;
  params.gate = address<const float>(gate.view);
  params.gate_row_stride = static_cast<uint32_t>(gate.row_stride);
  params.gate_head_stride = static_cast<uint32_t>(gate.head_stride);
  return true;
}

}  // namespace moeflux::cuda
