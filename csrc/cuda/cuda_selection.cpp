// Attention to the rows that an index selects.
#include <bit>

#include "cuda/cuda_commands.h"

namespace moeflux::cuda {

void CudaCommands::index_scores(const IndexScoresArgs& args, int64_t n) {
  op("index_scores", [&] {
    const int64_t seen = units_seen(args.first_position + n - 1, args.keys.unit);
    if (seen == 0) return;
    const IndexScoresParams params = {.q = address<const float>(args.q.view),
                                      .weights = address<const float>(args.weights),
                                      .rows = cached_rows(args.keys.blocks, args.first_position, n),
                                      .scores = address<float>(args.scores),
                                      .keys_begin = static_cast<uint64_t>(args.keys.offset),
                                      .stride = static_cast<uint64_t>(args.stride),
                                      .heads = static_cast<uint32_t>(args.q.heads),
                                      .dim = static_cast<uint32_t>(args.q.dim),
                                      .unit = static_cast<uint32_t>(args.keys.unit),
                                      .block_keys = static_cast<uint32_t>(args.keys.rows()),
                                      .q_row_stride = static_cast<uint32_t>(args.q.row_stride),
                                      .q_head_stride = static_cast<uint32_t>(args.q.head_stride),
                                      .scale = args.scale};
    // As many as a power of two, so that the launches stay as they are for many steps.
    flat(concat("index_scores_", gpu::type_of(args.keys)), params,
         static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(seen))), n);
  });
}

void CudaCommands::index_select(const IndexSelectArgs& args, int64_t n) {
  op("index_select", [&] {
    const IndexSelectParams params = {.scores = address<const float>(args.scores),
                                      .ids = address<int>(args.ids),
                                      .first_position = static_cast<uint64_t>(args.first_position),
                                      .stride = static_cast<uint64_t>(args.stride),
                                      .unit = static_cast<uint32_t>(args.unit),
                                      .count = static_cast<uint32_t>(args.count)};
    launch("index_select", {static_cast<uint32_t>(n)}, row_threads, params);
  });
}

void CudaCommands::gather_rows(const GatherRowsArgs& args) {
  op("gather_rows", [&] {
    const int64_t all = selected_rows(args.position, args.unit, args.count);
    const GatherRowsParams params = {.ids = address<const int>(args.ids),
                                     .from = cached_rows(args.from.blocks, args.position, 1),
                                     .to = cached_rows(args.to.blocks, all - 1, 1),
                                     .from_begin = static_cast<uint64_t>(args.from.offset),
                                     .to_begin = static_cast<uint64_t>(args.to.offset),
                                     .skipped = static_cast<uint64_t>(args.position + 1 - all),
                                     .rows = static_cast<uint32_t>(all),
                                     .selected = static_cast<uint32_t>(args.count * args.unit),
                                     .unit = static_cast<uint32_t>(args.unit),
                                     .width = static_cast<uint32_t>(args.from.width),
                                     .heads = static_cast<uint32_t>(args.from.scales())};
    flat(concat("gather_rows_", gpu::type_of(args.from)), params, all * params.width);
    if (params.heads > 0) flat("gather_scales", params, all * params.heads);
  });
}

}  // namespace moeflux::cuda
