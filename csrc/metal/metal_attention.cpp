// Attention in both its forms, and the delta-net.
#include <algorithm>

#include "metal/metal_commands.h"

namespace moeflux::metal {
namespace {

// With fewer simdgroups than this, a GPU is half idle. Then spans of the cache go side by side.
constexpr int64_t enough_simdgroups = 512;
constexpr int64_t least_parts = 1 << 14;  // bytes

}  // namespace

MetalCommands::RowTable MetalCommands::row_table(std::span<const View> blocks, int64_t rows) {
  static_assert(cached_block == block_rows && attention_span == cached_block);
  const int64_t count = divide_up(rows, block_rows);
  for (const RowTable& made : row_tables_)
    if (made.blocks == blocks.data() && made.count >= count) return made;
  RowTable made = {blocks.data(), count, {}, {}};
  // Before anything of the op is encoded, because what has no room for it departs.
  made.table = room_for(count * static_cast<int64_t>(sizeof(RowBlock)), backend_.tables_);
  made.buffers.fill(or_nothing({}));
  auto* to = reinterpret_cast<RowBlock*>(made.table.bytes());
  uint32_t used = 0;
  for (const View& block : blocks.first(static_cast<size_t>(count))) {
    if (!block) {  // of rows that nobody sees any more
      *to++ = {0, 0, 0};
      continue;
    }
    uint32_t buffer = 0;
    while (buffer < used && made.buffers[buffer].buffer != block.buffer) ++buffer;
    if (buffer == row_buffers)
      throw DeviceError(concat("metal: expected rows of a session in at most ", row_buffers, " buffers, found more"));
    if (buffer == used) made.buffers[used++] = {block.buffer, 0};
    *to++ = {static_cast<uint64_t>(block.offset), buffer, 0};
  }
  row_tables_.push_back(made);
  return made;
}

// Where there is no room for the second beside the first, the command buffer departs, and the first is made again.
std::pair<MetalCommands::RowTable, MetalCommands::RowTable> MetalCommands::row_tables(std::span<const View> first,
                                                                                      int64_t first_rows,
                                                                                      std::span<const View> second,
                                                                                      int64_t second_rows) {
  for (;;) {
    const RowTable one = row_table(first, first_rows);
    const RowTable other = row_table(second, second_rows);
    const auto is_first = [&](const RowTable& made) { return made.blocks == one.blocks; };
    if (std::ranges::any_of(row_tables_, is_first)) return {one, other};
  }
}

void MetalCommands::attention(const AttentionArgs& args, int64_t n) {
  op("attention", [&] { run_attention(gpu::AttentionTask::of(args), n); });
}

void MetalCommands::mla_attention(const LatentAttentionArgs& args, int64_t n) {
  op("mla_attention", [&] { run_attention(gpu::AttentionTask::of(args), n); });
}

// Some rows at a time, so that no dispatch runs long.
void MetalCommands::run_attention(const gpu::AttentionTask& task, int64_t n) {
  if (task.q.dim > int64_t{max_attention_dim})
    throw FormatError(concat("metal: expected attention over at most ", max_attention_dim, " dimensions, found ",
                             task.q.dim, ": load with backend=\"cpu\""));
  const int64_t seen = task.window > 0 ? std::min(task.window, task.first_position + n) : task.first_position + n;
  const double row = 2.0 * static_cast<double>(task.q.heads) * static_cast<double>(seen) *
                     static_cast<double>(task.q.dim + task.q_pe.dim);
  const int64_t most = std::max<int64_t>(1, static_cast<int64_t>(backend_.max_work_ / 2 / row));
  for (int64_t first = 0; first < n; first += most) {
    const int64_t count = std::min(most, n - first);
    attend(task, first, count);
    did(row * static_cast<double>(count));
  }
}

void MetalCommands::attend(const gpu::AttentionTask& task, int64_t first, int64_t n) {
  const int64_t heads = task.q.heads;
  const int64_t dim = task.q.dim;
  const int64_t length = task.first_position + first + n;
  const int64_t earliest = task.window > 0 ? std::max<int64_t>(0, task.first_position + first + 1 - task.window) : 0;
  const int64_t first_span = earliest / attention_span;
  const int64_t spans = divide_up(length, attention_span) - first_span;
  AttentionParams params = {.first_position = static_cast<uint64_t>(task.first_position + first),
                            .k_begin = static_cast<uint64_t>(task.k.offset),
                            .v_begin = static_cast<uint64_t>(task.v.offset),
                            .pe_begin = static_cast<uint64_t>(task.k_pe.offset),
                            .n = static_cast<uint32_t>(n),
                            .heads = static_cast<uint32_t>(heads),
                            .kv_heads = static_cast<uint32_t>(task.kv_heads),
                            .dim = static_cast<uint32_t>(dim),
                            .pe_dim = static_cast<uint32_t>(task.q_pe.dim),
                            .q_row_stride = static_cast<uint32_t>(task.q.row_stride),
                            .q_head_stride = static_cast<uint32_t>(task.q.head_stride),
                            .q_pe_row_stride = static_cast<uint32_t>(task.q_pe.row_stride),
                            .q_pe_head_stride = static_cast<uint32_t>(task.q_pe.head_stride),
                            .first_span = 0,
                            .spans = static_cast<uint32_t>(spans),
                            .is_first = true,
                            .is_last = true,
                            .window = static_cast<uint32_t>(task.window),
                            .has_sinks = static_cast<bool>(task.sinks),
                            .scale = task.scale};
  const int64_t chunks = dim <= 4 * lanes ? 4 : dim <= 8 * lanes ? 8 : 16;
  const std::string kind = concat(chunks, "_", gpu::type_of(task.k));
  const View q = task.q.view.at(first * task.q.row_stride);
  const View q_pe = task.q_pe.dim ? task.q_pe.view.at(first * task.q_pe.row_stride) : or_nothing({});
  const View sinks = or_nothing(task.sinks);
  const View out = task.out.at(first * heads * dim);
  const RowTable rows = row_table(task.k.blocks, length);
  const auto& [a, b, c, d] = rows.buffers;
  const uint32_t tiles = divide_up(n * (heads / task.kv_heads), attention_queries);
  const auto kv_heads = static_cast<uint32_t>(task.kv_heads);

  if (!backend_.parts_) backend_.parts_ = backend_.allocate(least_parts, Memory::device, "attention");
  const int64_t query_bytes = (dim + 2) * 4;
  const int64_t side_by_side = std::min(spans, backend_.parts_->bytes() / (n * heads * query_bytes));
  const bool in_one_round = side_by_side == spans;
  if (spans == 1 || side_by_side == 0 || (!in_one_round && n > MetalBackend::max_carried) ||
      int64_t{tiles} * kv_heads >= enough_simdgroups) {
    dispatch({"attention", "attention_" + kind}, params, {q, q_pe, rows.table, a, b, c, d, sinks, out},
             {tiles, kv_heads});
    return;
  }
  if (!in_one_round) backend_.reserve_carried(n * heads * query_bytes);
  const View parts = {backend_.parts_.get(), 0};
  for (int64_t begin = 0, round = 0; begin < spans; begin += side_by_side, ++round) {
    const int64_t count = std::min(side_by_side, spans - begin);
    params.first_span = static_cast<uint32_t>(first_span + begin);
    params.spans = static_cast<uint32_t>(count);
    params.is_first = begin == 0;
    params.is_last = begin + count == spans;
    if (first + begin > 0) barrier();  // rows or spans before these have used the same room
    dispatch({"attention", "attention_spans_" + kind}, params, {q, q_pe, rows.table, a, b, c, d, parts},
             {tiles, kv_heads, static_cast<uint32_t>(count)});
    barrier();
    const View before = begin > 0 ? View{backend_.carried_[round % 2].get(), 0} : or_nothing({});
    const View after = params.is_last ? out : View{backend_.carried_[(round + 1) % 2].get(), 0};
    flat({"attention", "attention_merge"}, params, {parts, before, sinks, after}, dim, heads, n);
  }
}

// ---- Delta net ------------------------------------------------------------------------------------------------------

void MetalCommands::conv1d(const ConvArgs& args, int64_t n) {
  op("conv1d", [&] {
    const ConvParams params = {static_cast<uint32_t>(n), static_cast<uint32_t>(args.channels),
                               static_cast<uint32_t>(args.taps), static_cast<uint32_t>(args.dilation)};
    const View state = or_nothing(args.state);
    flat({"delta", "conv1d"}, params, {args.x, state, args.weight, args.out}, args.channels, n);
    barrier();
    flat({"delta", "conv1d_state"}, params, {args.x, state}, args.channels);
  });
}

void MetalCommands::delta_gates(const DeltaGatesArgs& args, int64_t n) {
  op("delta_gates", [&] {
    const DeltaGatesParams params = {static_cast<uint32_t>(args.heads), static_cast<uint32_t>(n * args.heads)};
    flat({"delta", "delta_gates"}, params, {args.alpha, args.b, args.a_log, args.dt_bias, args.decay, args.beta},
         n * args.heads);
  });
}

void MetalCommands::gated_delta(const DeltaArgs& args, int64_t n) {
  op("gated_delta", [&] {
    if (args.k.dim > int64_t{max_key_dim})
      throw FormatError(concat("metal: expected linear attention over keys of at most ", max_key_dim,
                               " numbers, found ", args.k.dim, ": load with backend=\"cpu\""));
    const DeltaParams params = {.n = static_cast<uint32_t>(n),
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
                                .v_head_stride = static_cast<uint32_t>(args.v.head_stride)};
    dispatch({"delta", "gated_delta"}, params,
             {args.q.view, args.k.view, args.v.view, args.decay, args.beta, args.state, args.out},
             {divide_up(args.v.dim, delta_values), static_cast<uint32_t>(args.v.heads)});
  });
}

}  // namespace moeflux::metal
