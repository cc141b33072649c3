// The experts, which are products of matrices that each row has others of.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "cuda/stored_matrices.h"
#include "cuda/tiles_params.h"
#include "cuda/wide.h"
#include "gpu/products.h"

namespace moeflux::cuda {
namespace {

constexpr int64_t most_grouped = 65535;  // pairs, whose counts are numbers of 16 bits

constexpr uint32_t tiles_own_bytes = 6 << 10;     // that a block has besides its streams of tiles and digits
constexpr uint32_t most_streamed_columns = 2048;  // rows that are longer have not been measured

// In shared memory: digits and groups of the columns that a block of few rows has at once.
uint32_t few_bytes(const Matrix& matrix) {
  const int64_t steps = std::min<int64_t>(matrix.columns / step_columns, few_slab_steps);
  const int64_t step_groups = steps / group_steps_of(matrix.format);
  return static_cast<uint32_t>(steps * few_step_bytes +
                               step_groups * few_rows * static_cast<int64_t>(sizeof(DigitGroup)));
}

bool slots_are_aligned(const ChosenExpertArgs& args) {
  return args.alignment % 16 == 0 && is_aligned(View{args.first.gate.weight.buffer, 0}.bytes());
}

}  // namespace

// Two blocks on each multiprocessor if they have room. A block's share seldom has tiles of more than two entries.
std::optional<CudaCommands::TilesRoom> CudaCommands::tiles_room(const Matrix& matrix) const {
  constexpr uint32_t most_entries = 2, streams = streaming_warps * stream_bytes;
  const auto columns = static_cast<uint32_t>(matrix.columns);
  if (columns > most_streamed_columns) return std::nullopt;
  const Chip& chip = launches_.chip();
  const uint32_t entry = columns / part_columns * entry_part_bytes;
  for (const uint32_t blocks : {2u, 1u}) {
    const uint32_t have = chip.shared_bytes_beside(blocks);
    if (tiles_own_bytes + streams + entry > have) continue;
    const uint32_t entries = std::min(most_entries, (have - tiles_own_bytes - streams) / entry);
    return TilesRoom{.blocks = blocks * chip.multiprocessors, .entries = entries, .bytes = entries * entry + streams};
  }
  return std::nullopt;
}

// Hardly more than a pair of each expert. With more, what comes from the L2 cache again takes longer than digits.
bool CudaCommands::go_by_tiles(const ChosenExpertArgs& args, int64_t pairs, bool are_aligned) const {
  const ExpertMatrices& e = args.first;
  return pairs <= args.experts && pairs <= int64_t{few_experts} && are_aligned && launches_.chip().has(9) &&
         is_aligned(args.x.bytes()) && is_aligned(args.scratch.bytes()) &&
         std::ranges::all_of(std::array{&e.gate, &e.up, &e.down},
                             [&](const Matrix* matrix) { return may_be_copied(*matrix, 0) && tiles_room(*matrix); });
}

// With down goes the shared expert.
void CudaCommands::launch_tiles(const char* name, const Lists& lists, const Matrix& matrix, bool is_double,
                                const ExpertParams& params) {
  const TilesRoom room = *tiles_room(matrix);
  ExpertTilesParams tiles = {.experts = params,
                             .shared = {},
                             .shared_x = nullptr,
                             .shared_out = nullptr,
                             .shared_rows = 0,
                             .pairs = static_cast<uint32_t>(lists.count),
                             .expert_count = lists.experts,
                             .entry_room = room.entries,
                             .is_behind_gate_up = !is_double && lists.has_gate_up,
                             .nothing = 0};
  if (!is_double && lists.shared) {
    const RowsParams& own = *lists.shared;
    tiles.shared = own.matrices[0];
    tiles.shared_x = lists.shared_x;
    tiles.shared_out = own.out[0];
    tiles.shared_rows = own.n;
  }
  launch(concat(name, "_tiles_", matrix.format.bits), {room.blocks}, streaming_warps * lanes, tiles, room.bytes);
}

CudaCommands::Lists CudaCommands::lists_of(const ExpertArgs& args) {
  Lists lists;
  int64_t longest = 0;
  int64_t total = 0;
  for (const ExpertJob& job : args.jobs) {
    total += job.count;
    longest = std::max(longest, job.count);
  }
  if (total == 0) return lists;
  const ExpertMatrices& first = args.jobs.front().expert;
  const int64_t base = gpu::base_of(first);
  lists.are_aligned = std::ranges::all_of(args.jobs, [](const ExpertJob& job) {
    return is_aligned(View{job.expert.gate.weight.buffer, gpu::base_of(job.expert)}.bytes());
  });
  for (const Matrix* matrix : {&first.gate, &first.up, &first.down})
    lists.are_aligned = lists.are_aligned && is_aligned(*matrix, base);
  // Where experts have hardly more than a pair each, blocks of several would be empty.
  if (total < 3 * std::ssize(args.jobs)) longest = 1;
  if (usual_pairs(total, std::ssize(args.jobs)) <= many_rows) longest = std::min<int64_t>(longest, many_rows);
  lists.rows = most_rows;  // all three have blocks of one size
  for (const Matrix* matrix : {&first.gate, &first.up, &first.down})
    lists.rows = std::min(lists.rows, rows_of_block(matrix->format, longest, lists.are_aligned));
  for (const ExpertJob& job : args.jobs) lists.count += divide_up(job.count, lists.rows);
  const List blocks = launches_.list(lists.count * static_cast<int64_t>(sizeof(ExpertBlock)));
  const List pairs = launches_.list(total * 4);
  auto* block = blocks.values<ExpertBlock>();
  uint32_t written = 0;
  for (const ExpertJob& job : args.jobs) {
    const View slot = {job.expert.gate.weight.buffer, gpu::base_of(job.expert)};
    for (int64_t at = 0; at < job.count; at += lists.rows)
      *block++ = {address<const uint8_t>(slot), written + static_cast<uint32_t>(at),
                  static_cast<uint32_t>(std::min(lists.rows, job.count - at)), static_cast<uint32_t>(job.index), 0};
    std::memcpy(pairs.values<uint32_t>() + written, job.pairs, static_cast<size_t>(job.count) * 4);
    written += static_cast<uint32_t>(job.count);
  }
  lists.blocks = reinterpret_cast<const ExpertBlock*>(blocks.device);
  lists.pairs = reinterpret_cast<const uint32_t*>(pairs.device);
  return lists;
}

ExpertParams CudaCommands::expert_params(const Lists& lists, int64_t base, const Matrix& matrix, const Second& second,
                                         View bias, int64_t k, View x, View out) const {
  const auto place = [&](const View& view) { return view ? static_cast<uint64_t>(view.offset - base) : 0; };
  const auto places = [&](const Matrix& m) { return ExpertMatrix{place(m.weight), place(m.scales), place(m.biases)}; };
  return {.matrix = places(matrix),
          .second = places(second.matrix ? *second.matrix : matrix),
          .slots = lists.slots,
          .slot_of = lists.slot_of,
          .ids = lists.ids,
          .blocks = lists.blocks,
          .pairs = lists.pairs,
          .x = address<const float>(x),
          .digits = nullptr,
          .groups = nullptr,
          .bias = address<const float>(bias),
          .second_bias = address<const float>(second.bias),
          .out = address<float>(out),
          .rows = static_cast<uint32_t>(matrix.rows),
          .columns = static_cast<uint32_t>(matrix.columns),
          .group_steps = group_steps_of(matrix.format),
          .number = number_of(matrix.format),
          .k = static_cast<uint32_t>(k),
          .alpha = second.alpha,
          .limit = second.limit,
          .is_geglu = second.is_geglu};
}

// out[p] = W . x[p / k] for every pair; with a second matrix silu(W . x) * (V . x), or what is in its place. `base`:
// the first byte of the expert that these matrices are of; all are laid out as it is.
void CudaCommands::product_of_experts(const char* name, const Lists& lists, int64_t base, const Matrix& matrix,
                                      const Second& second, View bias, int64_t k, View x, View out) {
  ExpertParams params = expert_params(lists, base, matrix, second, bias, k, x, out);
  const bool aligned =
      lists.are_aligned && is_aligned(matrix, base) && (!second.matrix || is_aligned(*second.matrix, base));
  if (lists.are_tiles) return launch_tiles(name, lists, matrix, second.matrix != nullptr, params);
  const std::string kernel = concat(name, kind_of(lists.rows), format_name(matrix.format, aligned));
  const auto blocks = static_cast<uint32_t>(lists.count);
  if (!has_digits(matrix.format))
    return launch(kernel, {divide_up(matrix.rows, plain_outputs_of(matrix.format, lists.rows)), blocks},
                  plain_warps * lanes, params);
  const uint32_t tiles = divide_up(matrix.rows, second.matrix ? tile_rows / 2 : tile_rows);
  if (lists.rows > 1) return multiply_pairs(kernel, lists, matrix, aligned, tiles, params);
  const bool are_slabs = are_wide(matrix.rows, matrix.columns) && aligned && may_be_copied(matrix, base) &&
                         (!second.matrix || may_be_copied(*second.matrix, base)) && is_aligned(x.bytes());
  const auto bits = static_cast<uint32_t>(matrix.format.bits);
  if (const auto room = are_slabs ? wide_room(params.columns, bits, tiles, blocks) : std::nullopt)
    return launch(concat(name, "_wide_", bits), {divide_up(tiles, room->of_block), blocks}, room->threads,
                  WideExpertParams{params, room->tile_parts, room->places, room->together, 0}, room->bytes);
  // The digits of a row serve as many tiles as leave every processor its blocks.
  const uint32_t together = std::min(tiles, tiles_together(int64_t{tiles} * blocks));
  launch(kernel, {divide_up(tiles, together), blocks}, product_threads(matrix.columns), params);
}

// Where a block may have several pairs, whose digits are made before.
void CudaCommands::multiply_pairs(const std::string& kernel, const Lists& lists, const Matrix& matrix, bool aligned,
                                  uint32_t tiles, ExpertParams params) {
  const auto blocks = static_cast<uint32_t>(lists.count);
  const uint32_t of_block = divide_up(lists.rows, fragment_rows);
  const int64_t fragments = int64_t{blocks} * of_block;
  auto* made = room<uint8_t>(digits, digit_bytes(fragments, matrix.columns));
  auto* made_groups = room<DigitGroup>(groups, group_bytes(fragments, matrix.columns / matrix.format.group_size));
  const bool are_many = lists.rows >= many_rows;
  launch_digits(DigitsParams{.x = params.x,
                             .blocks = lists.blocks,
                             .pairs = lists.pairs,
                             .digits = made,
                             .groups = made_groups,
                             .x_batch = 0,
                             .x_stride = params.columns,
                             .columns = params.columns,
                             .group_steps = params.group_steps,
                             .n = 0,
                             .block_fragments = of_block,
                             .k = params.k,
                             .in_halves = are_many,
                             .nothing = 0},
                fragments, 1);
  params.digits = made;
  params.groups = made_groups;
  if (are_many)
    launch(kernel, {divide_up(tiles, many_warps), blocks}, many_warps * lanes, params,
           many_bytes(matrix.format, lists.rows));
  else if (is_known(matrix.format) && (aligned || matrix.format.is_mxfp4()))
    launch(kernel, {divide_up(tiles, few_warps), blocks}, few_warps * lanes, params, few_bytes(matrix));
  else
    launch(kernel, {tiles, blocks}, product_threads(matrix.columns), params);
}

void CudaCommands::feed_forward(const Lists& lists, const ExpertMatrices& e, int64_t base, const ExpertArgs& args) {
  const ExpertFlavour& f = args.flavour;
  gpu::feed_forward(
      e, args,
      [&](const char* kernel, const Matrix& matrix, const Second& second, View bias, int64_t k, View x, View out) {
        product_of_experts(kernel, lists, base, matrix, second, bias, k, x, out);
      },
      [&](View gate, View up, int64_t count) {
        const SwigluParams params = {
            address<float>(gate), address<const float>(up), static_cast<uint64_t>(count), f.alpha, f.limit, f.geglu};
        flat("swiglu", params, count);
      },
      [] {});  // launches are in order
}

void CudaCommands::expert_ffn(const ExpertArgs& args) {
  op("expert_ffn", [&] {
    const Lists lists = lists_of(args);
    if (lists.count == 0) return;
    const ExpertMatrices& expert = args.jobs.front().expert;
    feed_forward(lists, expert, gpu::base_of(expert), args);
  });
}

// The pairs of several rows, grouped by a kernel, which makes the choice, too, if there is a `route`. Each expert has
// blocks for as many pairs as would be its share, unless that is few.
CudaCommands::Lists CudaCommands::group(const ChosenExpertArgs& args, int64_t pairs, const RouteParams* route) {
  Lists lists;
  lists.are_aligned = slots_are_aligned(args);
  for (const Matrix* matrix : {&args.first.gate, &args.first.up, &args.first.down})
    lists.are_aligned = lists.are_aligned && is_aligned(*matrix, 0);
  if (go_by_tiles(args, pairs, lists.are_aligned)) {  // whose kernels group them
    if (route) launch_choice(static_cast<uint32_t>(pairs / args.k), *route);
    lists.are_tiles = true;
    lists.has_gate_up = args.first.gate.format == args.first.up.format;
    lists.slots = address<const uint8_t>({args.first.gate.weight.buffer, 0});
    lists.slot_of = address<const uint64_t>(args.slots);
    lists.ids = address<const int>(args.ids);
    lists.count = pairs;
    lists.experts = static_cast<uint32_t>(args.experts);
    return lists;
  }
  const int64_t usual = usual_pairs(pairs, args.experts);
  lists.rows = most_rows;
  for (const Matrix* matrix : {&args.first.gate, &args.first.up, &args.first.down})
    lists.rows = std::min(lists.rows, rows_of_block(matrix->format, usual, lists.are_aligned));
  lists.count = most_blocks(pairs, args.experts, lists.rows);
  const int64_t block_bytes = lists.count * static_cast<int64_t>(sizeof(ExpertBlock));
  const View all = launches_.room(chosen, block_bytes + pairs * 4);
  lists.blocks = address<const ExpertBlock>(all);
  lists.pairs = address<const uint32_t>(all.at(block_bytes, 1));
  const GroupParams params = {.ids = address<const int>(args.ids),
                              .slots = address<const uint8_t>({args.first.gate.weight.buffer, 0}),
                              .slot_of = address<const uint64_t>(args.slots),
                              .blocks = const_cast<ExpertBlock*>(lists.blocks),
                              .pairs = const_cast<uint32_t*>(lists.pairs),
                              .count = static_cast<uint32_t>(pairs),
                              .experts = static_cast<uint32_t>(args.experts),
                              .block_rows = static_cast<uint32_t>(lists.rows),
                              .most_blocks = static_cast<uint32_t>(lists.count)};
  if (route) {
    const auto n = static_cast<uint32_t>(pairs / args.k);
    launch("route_rows", {1}, std::max(n * lanes, few_experts), RouteRowsParams{*route, params, n, 0});
  } else {
    launch("group_experts", {1}, group_warps * lanes, params);
  }
  return lists;
}

// Down of the shared expert, which goes with down of the others.
bool CudaCommands::takes_rows_down(Lists& lists, const ChosenExpertArgs& args, const RowsProduct& shared) const {
  const RowsParams& own = shared.params;
  const ExpertMatrices& e = args.first;
  const auto columns = static_cast<uint32_t>(e.down.columns), rows = static_cast<uint32_t>(e.down.rows);
  if (!lists.are_tiles || e.gate.format != e.up.format || own.columns != columns || own.rows[0] != rows ||
      own.bits[0] != static_cast<uint32_t>(e.down.format.bits) || own.number != number_of(e.down.format) ||
      shared.x_stride != columns || own.out_stride[0] != rows || own.residual || !is_aligned(shared.x))
    return false;
  const int64_t pairs = own.n * args.k, shared_count = int64_t{own.n} * rows, x_count = int64_t{own.n} * columns;
  const auto* scratch = address<const float>(args.scratch);
  const auto* out = address<const float>(args.out);
  if (meet(own.out[0], shared_count, scratch, pairs * columns) || meet(own.out[0], shared_count, out, pairs * rows) ||
      meet(own.out[0], shared_count, shared.x, x_count) || meet(out, pairs * rows, shared.x, x_count))
    return false;
  lists.shared = own;
  lists.shared_x = shared.x;
  return true;
}

// A row's pairs have a block each, and find their experts themselves.
void CudaCommands::chosen_expert_ffn(const ChosenExpertArgs& args, int64_t n) {
  op("chosen_expert_ffn", [&] {
    const int64_t pairs = n * args.k;
    if (pairs == 0) return;
    Lists lists;
    const ExpertArgs rest = {args.x,       n,        args.hidden, args.intermediate, args.k, {},
                             args.scratch, args.out, args.flavour};
    if (const std::optional<RowsForward> forward = take_rows_choice(args, n)) {
      lists = group(args, pairs, &forward->route);
      const bool has_shared = forward->down && takes_rows_down(lists, args, *forward->down);
      feed_forward(lists, args.first, 0, rest);
      if (forward->down && !has_shared) wait_with(*forward->down);
      return;
    }
    if (n > 1 && pairs <= most_grouped) return feed_forward(group(args, pairs), args.first, 0, rest);
    lists.slots = address<const uint8_t>({args.first.gate.weight.buffer, 0});
    lists.slot_of = address<const uint64_t>(args.slots);
    lists.ids = address<const int>(args.ids);
    lists.count = pairs;
    lists.rows = 1;
    lists.are_aligned = slots_are_aligned(args);
    if (n == 1 && takes_choice(args, lists)) return;
    feed_forward(lists, args.first, 0, rest);
  });
}

}  // namespace moeflux::cuda
