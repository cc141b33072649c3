// Attention to the rows that an index selects.
#include <algorithm>
#include <cstring>

#include "backend/cpu_commands.h"

namespace moeflux {

cpu::Rows CpuCommands::kind_of(const Cache& rows) {
  return rows.dtype == DType::i8 ? cpu::Rows::codes : rows.dtype == DType::bf16 ? cpu::Rows::bf16 : cpu::Rows::f32;
}

const std::byte* const* CpuCommands::blocks_of(const Cache& rows, int64_t count) {
  lists_.blocks.clear();
  for (int64_t i = 0; i * rows.rows() < count; ++i) {
    const View& block = rows.blocks[static_cast<size_t>(i)];
    lists_.blocks.push_back(block ? block.bytes() : nullptr);
  }
  return lists_.blocks.data();
}

void CpuCommands::index_scores(const IndexScoresArgs& args, int64_t n) {
  op("index_scores", [&] {
    cpu::IndexTask task;
    task.q = args.q.view.f32();
    task.q_row_stride = args.q.row_stride;
    task.q_head_stride = args.q.head_stride;
    task.weights = args.weights ? args.weights.f32() : nullptr;
    task.blocks = blocks_of(args.keys, units_seen(args.first_position + n - 1, args.keys.unit));
    task.keys_offset = args.keys.offset;
    task.block_keys = args.keys.rows();
    task.kind = kind_of(args.keys);
    task.rows = n;
    task.heads = args.q.heads;
    task.dim = args.q.dim;
    task.first_position = args.first_position;
    task.unit = args.keys.unit;
    task.scale = args.scale;
    task.scores = args.scores.f32();
    task.stride = args.stride;
    pool_.parallel(kernels_.selection.score_units(task), [&](int64_t unit) { kernels_.selection.score(task, unit); });
  });
}

void CpuCommands::index_select(const IndexSelectArgs& args, int64_t n) {
  op("index_select", [&] {
    pool_.parallel(n, [&](int64_t row) {
      const int64_t seen = units_seen(args.first_position + row, args.unit);
      if (seen > args.count)
        kernels_.selection.select(args.scores.f32() + row * args.stride, seen, args.count,
                                  args.ids.i32() + row * args.count);
    });
  });
}

void CpuCommands::gather_rows(const GatherRowsArgs& args) {
  op("gather_rows", [&] {
    const int64_t all = selected_rows(args.position, args.unit, args.count);
    const int64_t before_last = args.position + 1 - all;  // rows that were not selected
    const int64_t row_bytes = args.from.row_bytes();
    const auto place = [](const Cache& cache, int64_t row) {
      return cache.blocks[static_cast<size_t>(row / block_rows)].bytes();
    };
    spread(all, args.from.width, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const bool is_selected = i < args.count * args.unit;
        const int64_t row = is_selected ? args.ids.i32()[i / args.unit] * args.unit + i % args.unit : before_last + i;
        const std::byte* source = place(args.from, row);
        std::byte* target = place(args.to, i);
        std::memcpy(target + args.to.offset + i % block_rows * row_bytes,
                    source + args.from.offset + row % block_rows * row_bytes, static_cast<size_t>(row_bytes));
        for (int64_t head = 0; head < args.from.scales(); ++head)
          std::memcpy(target + args.to.scales_offset() + (head * block_rows + i % block_rows) * 2,
                      source + args.from.scales_offset() + (head * block_rows + row % block_rows) * 2, 2);
      }
    });
  });
}

}  // namespace moeflux
