// Attention to the rows that an index selects.
#include <algorithm>

#include "metal/metal_commands.h"

namespace moeflux::metal {

void MetalCommands::index_scores(const IndexScoresArgs& args, int64_t n) {
  op("index_scores", [&] {
    const int64_t seen = units_seen(args.first_position + n - 1, args.keys.unit);
    if (seen == 0) return;
    const IndexScoresParams params = {.first_position = static_cast<uint64_t>(args.first_position),
                                      .keys_begin = static_cast<uint64_t>(args.keys.offset),
                                      .stride = static_cast<uint64_t>(args.stride),
                                      .heads = static_cast<uint32_t>(args.q.heads),
                                      .dim = static_cast<uint32_t>(args.q.dim),
                                      .unit = static_cast<uint32_t>(args.keys.unit),
                                      .block_keys = static_cast<uint32_t>(args.keys.rows()),
                                      .q_row_stride = static_cast<uint32_t>(args.q.row_stride),
                                      .q_head_stride = static_cast<uint32_t>(args.q.head_stride),
                                      .has_weights = bool(args.weights),
                                      .scale = args.scale};
    const RowTable rows = row_table(args.keys.blocks, seen * args.keys.unit);
    const auto& [a, b, c, d] = rows.buffers;
    dispatch({"selection", concat("index_scores_", gpu::type_of(args.keys))}, params,
             {args.q.view, or_nothing(args.weights), rows.table, a, b, c, d, args.scores},
             {divide_up(seen, lanes), static_cast<uint32_t>(n)});
    did(static_cast<double>(n * seen) * static_cast<double>(args.q.heads * args.q.dim));
  });
}

void MetalCommands::index_select(const IndexSelectArgs& args, int64_t n) {
  op("index_select", [&] {
    const IndexSelectParams params = {.first_position = static_cast<uint64_t>(args.first_position),
                                      .stride = static_cast<uint64_t>(args.stride),
                                      .unit = static_cast<uint32_t>(args.unit),
                                      .count = static_cast<uint32_t>(args.count)};
    dispatch({"selection", "index_select"}, params, {args.scores, args.ids}, {static_cast<uint32_t>(n)});
  });
}

void MetalCommands::gather_rows(const GatherRowsArgs& args) {
  op("gather_rows", [&] {
    const int64_t all = selected_rows(args.position, args.unit, args.count);
    GatherRowsParams params = {.from_begin = static_cast<uint64_t>(args.from.offset),
                               .to_begin = static_cast<uint64_t>(args.to.offset),
                               .skipped = static_cast<uint64_t>(args.position + 1 - all),
                               .first = 0,
                               .selected = static_cast<uint32_t>(args.count * args.unit),
                               .unit = static_cast<uint32_t>(args.unit),
                               .width = static_cast<uint32_t>(args.from.width),
                               .heads = static_cast<uint32_t>(args.from.scales())};
    const auto [from, to] = row_tables(args.from.blocks, args.position + 1, args.to.blocks, all);
    const auto& [a, b, c, d] = from.buffers;
    const auto buffer_of = [&](int64_t row) { return args.to.blocks[static_cast<size_t>(row / block_rows)].buffer; };
    int64_t end = 0;
    for (int64_t begin = 0; begin < all; begin = end) {  // as far as blocks lie in one buffer
      while (end < all && buffer_of(end) == buffer_of(begin)) end += block_rows;
      end = std::min(end, all);
      params.first = static_cast<uint32_t>(begin);
      const View out = {buffer_of(begin), 0};
      flat({"selection", concat("gather_rows_", gpu::type_of(args.from))}, params,
           {args.ids, from.table, a, b, c, d, to.table, out}, params.width, end - begin);
      if (params.heads > 0)
        flat({"selection", "gather_scales"}, params, {args.ids, from.table, a, b, c, d, to.table, out}, params.heads,
             end - begin);
    }
  });
}

}  // namespace moeflux::metal
