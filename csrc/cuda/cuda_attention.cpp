// Attention in both its forms, and the delta-net.
#include <algorithm>
#include <bit>
#include <utility>

#include "core/error.h"
#include "cuda/cuda_commands.h"

namespace moeflux::cuda {
namespace {

constexpr int64_t most_chunks = 128;                       // of one row; where there are more, a part is a span
constexpr int64_t attention_blocks_of_multiprocessor = 2;  // with fewer, it is half idle
constexpr int64_t few_conv_rows = 8;

// Whether cached rows may be loaded sixteen bytes at a time, as far as their blocks go.
bool blocks_are_aligned(const gpu::AttentionTask& task) {
  return std::ranges::all_of(task.k.blocks, [](const View& block) { return !block || is_aligned(block.bytes()); });
}

// Whether there are kernels that have keys and values in shared memory: for some widths, and rows that are loaded
// sixteen bytes at a time.
bool rows_may_be_copied(const gpu::AttentionTask& task) {
  const auto dim = static_cast<uint32_t>(task.q.dim);
  return (dim == 128 || dim == 256) && task.q_pe.dim == 0 && task.k.offset % 16 == 0 && task.v.offset % 16 == 0 &&
         blocks_are_aligned(task);
}

// Whether there is a kernel that takes many heads through a chunk of latents.
bool are_latents(const gpu::AttentionTask& task) {
  return task.q.dim == int64_t{latent_dim} && task.q_pe.dim == int64_t{latent_pe_dim} && task.kv_heads == 1 &&
         task.k.offset == task.v.offset && task.window == 0 && !task.sinks && task.k.offset % 16 == 0 &&
         task.k_pe.offset % 16 == 0 && blocks_are_aligned(task);
}

// Of a block that takes a row's queries through a part.
uint32_t copied_bytes(const AttentionParams& params, size_t number_bytes) {
  return (params.part_chunks > 1 ? attention_span_buffers : attention_row_buffers) *
         attention_buffer_bytes(params.dim, static_cast<uint32_t>(number_bytes));
}

// The same of a span, if a part was a chunk.
uint32_t bytes_of_span(uint32_t row_bytes) { return row_bytes / attention_row_buffers * attention_span_buffers; }

// Of one row, as many as there is room for.
int64_t part_bytes(const AttentionParams& params) {
  return int64_t{params.heads} * params.part_count * (params.dim + 2) * 4;
}

}  // namespace

// Where the call's rows are, for all ops of the batch that see the same. It is in memory, and not among the arguments,
// so that what is launched is the same from step to step.
const CachedRows* CudaCommands::cached_rows(std::span<const View> blocks, int64_t first, int64_t n) {
  static_assert(cached_block == block_rows && attention_span == cached_block);
  const size_t count = divide_up(first + n, block_rows);
  std::vector<const std::byte*> addresses;
  for (const View& block : blocks.first(count)) addresses.push_back(block ? block.bytes() : nullptr);
  for (const RowTable& made : row_tables_)
    if (made.first == static_cast<uint64_t>(first) && made.blocks == addresses) return made.rows;
  const List list = launches_.list(static_cast<int64_t>(sizeof(CachedRows) + count * sizeof(uint64_t)));
  *list.values<CachedRows>() = {static_cast<uint64_t>(first), count};
  std::ranges::copy(addresses, reinterpret_cast<const std::byte**>(list.values<CachedRows>() + 1));
  row_tables_.push_back(
      {static_cast<uint64_t>(first), std::move(addresses), reinterpret_cast<const CachedRows*>(list.device)});
  return row_tables_.back().rows;
}

// What a kernel asks for the sessions of its rows. Null if there is one.
template <typename T>
T* const* CudaCommands::list_of(const std::vector<T*>& sessions) {
  if (sessions.size() < 2) return nullptr;
  const std::vector<const void*> wanted(sessions.begin(), sessions.end());
  auto made = std::ranges::find(session_tables_, wanted, &SessionTable::sessions);
  if (made == session_tables_.end()) {
    const List list = launches_.list(static_cast<int64_t>(sessions.size() * sizeof(T*)));
    std::ranges::copy(sessions, list.values<T*>());
    made = session_tables_.insert(made, {wanted, list.device});
  }
  return reinterpret_cast<T* const*>(made->list);
}
template const CachedRows* const* CudaCommands::list_of(const std::vector<const CachedRows*>& sessions);
template float* const* CudaCommands::list_of(const std::vector<float*>& sessions);

// ---- Attention ------------------------------------------------------------------------------------------------------

void CudaCommands::attention(const AttentionArgs& args, int64_t n) {
  op("attention", [&] { run_attention(gpu::AttentionTask::of(args), n); });
}

void CudaCommands::mla_attention(const LatentAttentionArgs& args, int64_t n) {
  op("mla_attention", [&] { run_attention(gpu::AttentionTask::of(args), n); });
}

void CudaCommands::run_attention(const gpu::AttentionTask& task, int64_t n) {
  if (n == 0) return;
  if (task.q.dim > int64_t{max_attention_dim})
    throw FormatError(concat("cuda: expected attention over at most ", max_attention_dim, " dimensions, found ",
                             task.q.dim, ": load with backend=\"cpu\""));
  const int64_t heads = task.q.heads;
  AttentionParams params = {.q = address<const float>(task.q.view),
                            .q_pe = address<const float>(task.q_pe.view),
                            .rows = cached_rows(task.k.blocks, task.first_position, n),
                            .sessions = nullptr,
                            .sinks = address<const float>(task.sinks),
                            .gate = nullptr,
                            .out = address<float>(task.out),
                            .parts = nullptr,
                            .k_begin = static_cast<uint64_t>(task.k.offset),
                            .v_begin = static_cast<uint64_t>(task.v.offset),
                            .pe_begin = static_cast<uint64_t>(task.k_pe.offset),
                            .n = static_cast<uint32_t>(n),
                            .heads = static_cast<uint32_t>(heads),
                            .kv_heads = static_cast<uint32_t>(task.kv_heads),
                            .dim = static_cast<uint32_t>(task.q.dim),
                            .pe_dim = static_cast<uint32_t>(task.q_pe.dim),
                            .q_row_stride = static_cast<uint32_t>(task.q.row_stride),
                            .q_head_stride = static_cast<uint32_t>(task.q.head_stride),
                            .q_pe_row_stride = static_cast<uint32_t>(task.q_pe.row_stride),
                            .q_pe_head_stride = static_cast<uint32_t>(task.q_pe.head_stride),
                            .window = static_cast<uint32_t>(task.window),
                            .part_count = 0,
                            .part_chunks = 1,
                            .scale = task.scale,
                            .gate_row_stride = 0,
                            .gate_head_stride = 0,
                            .nothing = 0};
  const std::string kind = concat(gpu::type_of(task.k), "_", divide_up(task.q.dim, attention_threads));
  const int64_t queries = n * (heads / task.kv_heads);
  const uint32_t tiles = divide_up(queries, attention_queries);

  // Large tiles need less of everything, but leave multiprocessors idle where there are few of them, and one row has
  // few queries.
  const uint32_t large_tiles = divide_up(queries, attention_tile_queries);
  const Chip& chip = launches_.chip();
  const bool is_copied = rows_may_be_copied(task);
  const std::string copied_kind = concat(gpu::type_of(task.k), "_", task.q.dim);
  const bool are_large = is_copied && is_aligned(params.out) && chip.shared_bytes >= attention_tile_bytes(params.dim);
  if (n > 1 && 2 * large_tiles * task.kv_heads >= chip.multiprocessors && are_large)
    return wait_with(AttentionOutput{copied_kind, params, large_tiles, true, 0, {params.rows}});

  // Room for as many rows as a power of two has, so that the launches stay as they are for many steps.
  const int64_t length = task.first_position + n;
  const int64_t seen = std::min(length, task.window ? task.window + n : length);
  const auto count_of = [&](int64_t rows) {
    return static_cast<int64_t>(std::bit_ceil(divide_up(seen, rows))) + (task.window ? 1 : 0);
  };
  int64_t count = count_of(attention_chunk);
  if (count > most_chunks) {
    params.part_chunks = span_chunks;
    count = count_of(attention_span);
  }
  const int64_t bytes = n * heads * count * (task.q.dim + 2) * 4;
  const int64_t enough = attention_blocks_of_multiprocessor * launches_.chip().multiprocessors;
  const bool in_parts = int64_t{tiles} * task.kv_heads < enough &&
                        bytes <= std::min(most_part_bytes, launches_.room_limit(parts)) && count <= most_parts;
  params.part_count = in_parts ? static_cast<uint32_t>(count) : 0;
  const uint32_t row_bytes = copied_bytes(params, dtype_bytes(task.k.dtype));
  const bool is_row = in_parts && n == 1 && is_copied && chip.shared_bytes >= attention_row_own_bytes + row_bytes;
  AttentionOutput output = {is_row ? copied_kind : kind, params, tiles, false, is_row ? row_bytes : 0, {params.rows}};
  const auto chunk_bytes = latent_bytes(static_cast<uint32_t>(dtype_bytes(task.k.dtype)));
  if (in_parts && n == 1 && params.part_chunks == 1 && are_latents(task) &&
      chip.shared_bytes >= latent_own_bytes + chunk_bytes)
    output = {concat("latent_", gpu::type_of(task.k)),
              params,
              divide_up(heads, latent_queries),
              false,
              chunk_bytes,
              {params.rows},
              true};
  if (!takes_attention(output)) wait_with(output);
}

// Whether the rows of so many sessions, with so many chunks each, are blocks enough as spans.
bool CudaCommands::are_spans(const AttentionOutput& output, int64_t sessions, uint32_t part_count) const {
  const AttentionParams& params = output.params;
  const Chip& chip = launches_.chip();
  return sessions > 1 && !output.has_latents && params.part_chunks == 1 &&
         chip.shared_bytes >= attention_row_own_bytes + bytes_of_span(output.row_bytes) &&
         sessions * output.tiles * params.kv_heads * (part_count / span_chunks) >= chip.multiprocessors;
}

void CudaCommands::launch_attention(const AttentionOutput& output, const DigitRoom& to) {
  AttentionParams params = output.params;
  params.sessions = list_of(output.sessions);
  const auto sessions = static_cast<uint32_t>(output.sessions.size());
  uint32_t row_bytes = output.row_bytes;
  if (are_spans(output, sessions, params.part_count)) {
    params.part_chunks = span_chunks;
    params.part_count = spans_of(params.part_count);
    row_bytes = bytes_of_span(row_bytes);
  }
  if (output.has_large_tiles)
    return launch("attention_tiles_" + output.kind, {output.tiles, params.kv_heads}, attention_threads, params,
                  attention_tile_bytes(params.dim));
  const uint32_t shared = (params.dim + params.pe_dim) * attention_queries * sizeof(float);
  if (params.part_count == 0)
    return launch("attention_" + output.kind, {output.tiles, params.kv_heads}, attention_threads, params, shared);
  params.parts = room<float>(parts, sessions * part_bytes(params) * params.n);
  // Through a chunk, a block takes few queries, so that multiprocessors have something to do. Several sessions have
  // enough chunks for that, so it takes eight, because each block loads all keys and values of its chunk.
  const bool is_chunk = row_bytes > 0 && params.part_chunks == 1, are_few = is_chunk && sessions == 1;
  if (output.has_latents)
    launch("attention_" + output.kind, {output.tiles, sessions, params.part_count}, latent_threads, params, row_bytes);
  else
    launch(concat("attention_", row_bytes ? "row_" : "",
                  params.part_chunks > 1 ? "spans_"
                  : is_chunk && !are_few ? "eights_"
                                         : "chunks_",
                  output.kind),
           {are_few ? divide_up(params.heads / params.kv_heads, attention_row_queries) : output.tiles,
            sessions * params.kv_heads, params.part_count},
           attention_threads, params, row_bytes ? row_bytes : shared);
  const int64_t count = params.part_count;
  const int64_t spans = count / (span_chunks / params.part_chunks) + 2;
  launch("attention_merge", {params.heads * divide_up(params.dim, merge_numbers), params.n, sessions}, merge_threads,
         MergeParams{params, to},
         static_cast<uint32_t>(
             (std::min<int64_t>(count, merge_parts_together) * merge_numbers + 2 * count + 4 * spans) * 4));
}

// ---- Delta net ------------------------------------------------------------------------------------------------------

void CudaCommands::conv1d(const ConvArgs& args, int64_t n) {
  op("conv1d", [&] {
    const ConvParams params = {.x = address<const float>(args.x),
                               .state = address<float>(args.state),
                               .sessions = nullptr,
                               .weight = address<const float>(args.weight),
                               .out = address<float>(args.out),
                               .n = static_cast<uint32_t>(n),
                               .channels = static_cast<uint32_t>(args.channels),
                               .taps = static_cast<uint32_t>(args.taps),
                               .dilation = static_cast<uint32_t>(args.dilation)};
    if (n == 1) {
      if (takes_taps(params)) return;
      if (!takes_convolution(params)) wait_with(Convolved{params, {params.state}});
      return;
    }
    if (n <= few_conv_rows) return flat("conv1d_few", params, args.channels);
    flat("conv1d", params, args.channels, divide_up(n, conv_rows));
    flat("conv1d_state", params, args.channels);
  });
}

void CudaCommands::delta_gates(const DeltaGatesArgs& args, int64_t n) {
  op("delta_gates", [&] {
    const DeltaGatesParams params = {.alpha = address<const float>(args.alpha),
                                     .b = address<const float>(args.b),
                                     .a_log = address<const float>(args.a_log),
                                     .dt_bias = address<const float>(args.dt_bias),
                                     .decay = address<float>(args.decay),
                                     .beta = address<float>(args.beta),
                                     .heads = static_cast<uint32_t>(args.heads),
                                     .count = static_cast<uint32_t>(n * args.heads)};
    if (n == 1 ? takes_row_gates(params) : takes_gates_of_convolved(params)) return;
    if (n == 1) return wait_with(params);
    flat("delta_gates", params, n * args.heads);
  });
}

void CudaCommands::gated_delta(const DeltaArgs& args, int64_t n) {
  op("gated_delta", [&] {
    if (args.k.dim > int64_t{max_key_dim})
      throw FormatError(concat("cuda: expected linear attention over keys of at most ", max_key_dim, " numbers, found ",
                               args.k.dim, ": load with backend=\"cpu\""));
    DeltaParams params = {.q = address<const float>(args.q.view),
                          .k = address<const float>(args.k.view),
                          .v = address<const float>(args.v.view),
                          .decay = address<const float>(args.decay),
                          .beta = address<const float>(args.beta),
                          .state = address<float>(args.state),
                          .sessions = nullptr,
                          .out = address<float>(args.out),
                          .gates = {},
                          .q_kept = nullptr,
                          .k_kept = nullptr,
                          .v_kept = nullptr,
                          .n = static_cast<uint32_t>(n),
                          .value_heads = static_cast<uint32_t>(args.v.heads),
                          .key_dim = static_cast<uint32_t>(args.k.dim),
                          .value_dim = static_cast<uint32_t>(args.v.dim),
                          .key_heads = static_cast<uint32_t>(args.k.heads),
                          .neighbours = static_cast<uint32_t>(args.neighbours()),
                          .q_row_stride = static_cast<uint32_t>(args.q.row_stride),
                          .q_head_stride = static_cast<uint32_t>(args.q.head_stride),
                          .k_row_stride = static_cast<uint32_t>(args.k.row_stride),
                          .k_head_stride = static_cast<uint32_t>(args.k.head_stride),
                          .v_row_stride = static_cast<uint32_t>(args.v.row_stride),
                          .v_head_stride = static_cast<uint32_t>(args.v.head_stride),
                          .q_eps = 0,
                          .k_eps = 0,
                          .q_scale = 0,
                          .k_scale = 0,
                          .has_room = args.has_room};
    const std::string kernel = delta_kernel(args.k.dim);
    const Extent grid = {divide_up(args.v.dim, delta_values), static_cast<uint32_t>(args.v.heads)};
    if (n == 1 && (takes_step_delta(kernel, grid, params) || takes_delta(kernel, params))) return;
    if (n == 1 && !takes_inputs(params)) takes_gates(params);
    const Extent grid_of_many = {params.value_dim / delta_many_values, params.value_heads};
    // A kernel comes while the one before it still runs, and its blocks go to the multiprocessors that are free first.
    // These have so much of the shared memory that each gets one for itself, if there are enough.
    const Chip& chip = launches_.chip();
    const uint32_t spread = grid_of_many.x * grid_of_many.y <= chip.multiprocessors && chip.has(8)
                                ? chip.shared_bytes_of_multiprocessor / 2
                                : 0;
    const auto are_aligned = [](const void* at, int64_t strides) { return is_aligned(at) && strides % 4 == 0; };
    if (n > delta_stage && params.key_dim == delta_key_dim && params.value_dim % delta_many_values == 0 &&
        are_aligned(params.q, params.q_row_stride | params.q_head_stride) &&
        are_aligned(params.k, params.k_row_stride | params.k_head_stride) &&
        are_aligned(params.v, params.v_row_stride | params.v_head_stride) && is_aligned(params.state))
      return launch("gated_delta_many", grid_of_many, delta_warps * lanes, params, spread);
    if (n == 1) return wait_with(DeltaRow{kernel, grid, params, {params.state}, {}});
    launch(kernel, grid, delta_warps * lanes, params);
  });
}

}  // namespace moeflux::cuda
