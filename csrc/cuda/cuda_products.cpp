// Products of matrices as stored. And the room that ops need.
#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>

#include "cuda/stored_matrices.h"
#include "gpu/products.h"

namespace moeflux::cuda {
namespace {

// Whether one launch can multiply x with both.
bool go_together(const Product& a, const Product& b) {
  return a.matrix.format == b.matrix.format && a.matrix.columns == b.matrix.columns && !b.transposed &&
         a.x.buffer == b.x.buffer && a.x.offset == b.x.offset && a.x_stride == b.x_stride;
}

}  // namespace

// ---- Room -----------------------------------------------------------------------------------------------------------

// 256, or up to 1024 where these are small: several sessions share them.
int64_t CudaCommands::most_parts_of_row(int64_t heads, int64_t dim) {
  constexpr int64_t enough_bytes = int64_t{32} << 20;
  return std::clamp<int64_t>(enough_bytes / (heads * (dim + 2) * 4), 256, 1024);
}

std::vector<RoomSize> CudaCommands::rooms(const WorkSizes& sizes) {
  std::vector<RoomSize> rooms(room_count);
  // Of several sessions, or of one row that sees the longest context.
  const int64_t part_bytes = sizes.heads * (sizes.value_dim + 2) * 4;
  const auto longest = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(sizes.row_blocks))) + 1;
  if (sizes.value_dim) {
    const int64_t count = std::max(most_parts_of_row(sizes.heads, sizes.value_dim), std::min(longest, most_parts));
    rooms[parts] = {"attention", std::min(count * part_bytes, most_part_bytes)};
  }
  // The digits of a step's inputs, or of the pairs of all experts, each of which has a block that is not full. Where
  // that is one of most_rows, there are half as many pairs as all blocks have room for.
  const int64_t width = sizes.input_rows ? divide_up(sizes.inputs, sizes.input_rows) : 0;
  const int64_t expert_rows =
      std::max(sizes.pairs + std::min(sizes.pairs, sizes.products) * (many_rows - 1), 3 * sizes.pairs);
  const int64_t rows = sizes.rows > 1 ? sizes.input_rows + expert_rows + most_rows : 0;
  const int64_t fragments = divide_up(rows, fragment_rows);
  // Those of the pairs that routers on the device chose: as many blocks as there may be.
  int64_t pair_fragments = 0;
  int64_t block_count = 0;
  if (sizes.rows > 1 && sizes.pairs) {
    for (const int64_t size : {few_rows, many_rows, most_rows})
      if (size < most_rows || usual_pairs(sizes.pairs, sizes.products) >= most_rows)
        pair_fragments =
            std::max(pair_fragments, most_blocks(sizes.pairs, sizes.products, size) * size / fragment_rows);
    block_count = most_blocks(sizes.pairs, sizes.products, plain_rows);
  }
  rooms[digits] = {"digits", std::max(digit_bytes(fragments, width), digit_bytes(pair_fragments, sizes.pair_width))};
  rooms[groups] = {"digits", std::max(group_bytes(fragments, divide_up(width, step_columns)),
                                      group_bytes(pair_fragments, divide_up(sizes.pair_width, step_columns)))};
  rooms[chosen] = {"lists of experts", block_count * static_cast<int64_t>(sizeof(ExpertBlock)) + sizes.pairs * 4};
  const int64_t blocks = divide_up(sizes.logits, top_k_block);
  if (sizes.rows) rooms[heads_before_norm] = {"heads", divide_up(sizes.inputs, sizes.rows) * int64_t{4}};
  rooms[convolved_before_norm] = {"heads", sizes.channels * int64_t{4}};
  rooms[surveyed] = {"survey", blocks * std::clamp<int64_t>(sizes.rows, 1, many_rows) * 16};
  for (const size_t room : {picked_values, picked_ids})
    for (size_t round = 0; round < 2; ++round)
      rooms[room + round] = {"top-k", blocks > 1 ? blocks * std::min(sizes.picks, sizes.logits) * 4 : 0};
  return rooms;
}

int64_t CudaCommands::list_bytes(const WorkSizes& sizes) {
  constexpr int64_t alignment = 16;
  constexpr int64_t session_lists = 1 << 15;  // of what each of a few sessions has in each layer
  const int64_t blocks = sizes.pairs + sizes.products;
  const int64_t rows = static_cast<int64_t>(sizeof(CachedRows)) + sizes.row_blocks * 8;
  return sizes.pairs * 4 + blocks * static_cast<int64_t>(sizeof(ExpertBlock)) + rows + session_lists + 3 * alignment;
}

// ---- Products -------------------------------------------------------------------------------------------------------

bool CudaCommands::may_be_copied(const Matrix& matrix, int64_t base) {
  return has_copied_format(matrix.format) && is_aligned(matrix, base) && (matrix.scales.offset - base) % 16 == 0 &&
         (matrix.biases.offset - base) % 16 == 0;
}

// A block finds its rows once and goes through columns, as far as there are blocks enough for all multiprocessors.
void CudaCommands::launch_digits(const DigitsParams& params, int64_t fragments, uint32_t count) {
  constexpr uint32_t of_multiprocessor = 8;
  const int64_t blocks = of_multiprocessor * int64_t{launches_.chip().multiprocessors} / (fragments * count);
  launch("make_digits",
         {static_cast<uint32_t>(fragments),
          static_cast<uint32_t>(std::clamp<int64_t>(blocks, 1, divide_up(params.columns, lanes * pack))), count},
         fragment_rows * lanes, params);
}

void CudaCommands::embed(const Matrix& table, View ids, View out, int64_t n) {
  op("embed", [&] {
    const EmbedParams params = {.table = stored(table),
                                .ids = address<const int>(ids),
                                .out = address<float>(out),
                                .columns = static_cast<uint32_t>(table.columns),
                                .group_steps = group_steps_of(table.format),
                                .number = number_of(table.format),
                                .n = static_cast<uint32_t>(n)};
    flat("embed_" + bits_name(table.format), params, divide_up(table.columns, pack), n);
  });
}

void CudaCommands::matmul(std::span<const Product> products, int64_t n) {
  op("matmul", [&] {
    if (n == 0) return;
    while (!products.empty()) {
      const Product& first = products.front();
      const bool is_of_digits = !first.transposed && has_digits(first.matrix.format);
      size_t together = 1;
      while (is_of_digits && together < std::min<size_t>(most_outputs, products.size()) &&
             go_together(first, products[together]))
        ++together;
      const size_t evenly = gpu::evenly_apart(products);
      const bool all_together = is_of_digits && together >= evenly;
      const auto some = products.first(all_together ? together : evenly);
      if (all_together && n == 1)
        multiply_row(some);
      else if (!all_together || !multiply_rows(some, n))
        multiply(some, n, all_together);
      products = products.subspan(some.size());
    }
  });
}

// How many tiles of one row's products a block goes through, so that all blocks are on the chip at once.
uint32_t CudaCommands::tiles_together(int64_t tiles) const {
  constexpr int64_t blocks_of_multiprocessor = 4;
  return divide_up(tiles, blocks_of_multiprocessor * launches_.chip().multiprocessors);
}

void CudaCommands::multiply_row(std::span<const Product> products) {
  const Product& first = products.front();
  OneRowParams params = {.matrices = {},
                         .out = {},
                         .x = address<const float>(first.x),
                         .weight = nullptr,
                         .normed = nullptr,
                         .z = nullptr,
                         .heads = nullptr,
                         .residual = nullptr,
                         .taps = nullptr,
                         .tap_rows = nullptr,
                         .convolved = nullptr,
                         .rows = {},
                         .first_tile = {},
                         .tiles = 0,
                         .columns = static_cast<uint32_t>(first.matrix.columns),
                         .group_steps = group_steps_of(first.matrix.format),
                         .number = number_of(first.matrix.format),
                         .gated = no_output,
                         .eps = 0,
                         .bits = {},
                         .places = 0,
                         .together = 0,
                         .tile_parts = 0};
  bool aligned = true;
  for (size_t i = 0; i < products.size(); ++i) {
    const Product& product = products[i];
    params.matrices[i] = stored(product.matrix);
    params.out[i] = address<float>(product.out);
    params.rows[i] = static_cast<uint32_t>(product.matrix.rows);
    aligned = aligned && is_aligned(product.matrix);
  }
  const QuantFormat& format = first.matrix.format;
  const bool is_copied =
      aligned && std::ranges::all_of(products, [](const Product& product) { return may_be_copied(product.matrix, 0); });
  for (size_t i = 0; i < products.size(); ++i) params.bits[i] = static_cast<uint32_t>(format.bits);
  RowProduct product = {concat("matmul_one_", format_name(format, aligned)), params, products.size(), is_copied};
  if (takes_shared(product)) return;
  takes_norm(product.params, products);
  // Tiles in shared memory are for rows that are loaded sixteen bytes at a time, and for matrices longer than such a
  // row.
  const OneRowParams& of = product.params;
  for (const float* row : {of.x, of.weight, static_cast<const float*>(of.normed)})
    product.is_copied = product.is_copied && is_aligned(row);
  product.is_copied = product.is_copied && of.rows[0] >= fragment_rows;
  if (takes_heads(product)) return;
  wait_with(std::move(product));
}

// `together`: all are of one x, and are one product with more outputs. Otherwise they are evenly apart.
void CudaCommands::multiply(std::span<const Product> products, int64_t n, bool together) {
  const Product& first = products.front();
  const Matrix& m = first.matrix;
  const bool is_batch = !together && products.size() > 1;
  const gpu::Step step = is_batch ? gpu::step_between(first, products[1]) : gpu::Step{};
  const auto count = is_batch ? static_cast<uint32_t>(products.size()) : 1u;
  ProductParams params = {.matrix = stored(m),
                          .more = {},
                          .x = address<const float>(first.x),
                          .digits = nullptr,
                          .groups = nullptr,
                          .out = address<float>(first.out),
                          .x_batch = static_cast<uint64_t>(step.x / 4),
                          .out_batch = static_cast<uint64_t>(step.out / 4),
                          .batch_rows = static_cast<uint32_t>(step.rows),
                          .batch_fragments = 0,
                          .rows = static_cast<uint32_t>(m.rows),
                          .columns = static_cast<uint32_t>(m.columns),
                          .n = static_cast<uint32_t>(n),
                          .x_stride = static_cast<uint32_t>(first.x_stride),
                          .out_stride = static_cast<uint32_t>(first.out_stride),
                          .group_steps = group_steps_of(m.format),
                          .number = number_of(m.format),
                          .tiles = 0};
  if (first.transposed)
    return flat("matmul_transposed_" + bits_name(m.format), params, divide_up(m.columns, pack), n, count);
  bool aligned = is_aligned(m) && step.rows * m.format.weight_row_bytes(m.columns) % 16 == 0;
  uint32_t tiles = divide_up(m.rows, tile_rows);
  for (size_t i = 1; i < most_outputs; ++i) {
    MoreOutput& more = params.more[i - 1];
    more.first_tile = std::numeric_limits<uint32_t>::max();
    if (is_batch || i >= products.size()) continue;
    const Product& product = products[i];
    more = {.matrix = stored(product.matrix),
            .out = address<float>(product.out),
            .rows = static_cast<uint32_t>(product.matrix.rows),
            .out_stride = static_cast<uint32_t>(product.out_stride),
            .first_tile = tiles,
            .nothing = 0};
    tiles += divide_up(product.matrix.rows, tile_rows);
    aligned = aligned && is_aligned(product.matrix);
  }
  int64_t rows = rows_of_block(m.format, n, aligned);
  params.batch_fragments = divide_up(n, rows) * divide_up(rows, fragment_rows);
  // Large blocks leave multiprocessors idle where there are few of them.
  const uint32_t processors = launches_.chip().multiprocessors;
  const auto blocks_of = [&] { return divide_up(tiles, many_warps) * divide_up(n, rows) * count; };
  if (rows == most_rows && 2 * blocks_of() < 3 * processors) rows = many_rows;
  if (rows == many_rows && blocks_of() < processors) rows = few_rows;
  const std::string kernel =
      concat(rows == 1 ? "matmul_each_" : concat("matmul", kind_of(rows)), format_name(m.format, aligned));
  if (!m.format.is_quantised() && rows == 1) {  // of a small matrix, such as a router's, each output has a block
    params.tiles = m.rows * count > 4 * int64_t{launches_.chip().multiprocessors} ? plain_outputs : 1;
    return launch(kernel, {divide_up(m.rows, params.tiles), 1, count}, row_threads, params);
  }
  if (!has_digits(m.format))
    return launch(kernel, {divide_up(m.rows, plain_outputs_of(m.format, rows)), divide_up(n, rows), count},
                  plain_warps * lanes, params);
  if (rows == 1) {
    const bool is_short = divide_up(m.columns, part_columns) <= short_parts;
    const uint32_t warps = is_short ? std::min(product_warps, tiles) : 1;
    return launch(kernel, {divide_up(tiles, warps), 1, count}, is_short ? warps * lanes : product_threads(m.columns),
                  params);
  }
  const int64_t fragments = int64_t{params.batch_fragments} * count;
  params.digits = room<uint8_t>(digits, digit_bytes(fragments, m.columns));
  params.groups = room<DigitGroup>(groups, group_bytes(fragments, m.columns / m.format.group_size));
  const DigitsParams making = {.x = params.x,
                               .blocks = nullptr,
                               .pairs = nullptr,
                               .digits = const_cast<uint8_t*>(params.digits),
                               .groups = const_cast<DigitGroup*>(params.groups),
                               .x_batch = params.x_batch,
                               .x_stride = params.x_stride,
                               .columns = params.columns,
                               .group_steps = params.group_steps,
                               .n = params.n,
                               .block_fragments = 1,
                               .k = 1,
                               .in_halves = rows >= many_rows,
                               .nothing = 0};
  const MadeDigits made = {making, params.batch_fragments, count};
  make_digits(made, is_batch || m.format.group_size != 64 ? RowsSource()
                                                          : take_source(params.x, n, params.columns, params.x_stride));
  const uint32_t blocks = divide_up(n, rows);
  if (rows >= many_rows) {
    launch(kernel, {divide_up(tiles, many_warps), blocks, count}, many_warps * lanes, params,
           many_bytes(m.format, rows));
  } else {
    // All blocks are on the chip at once, and go through several tiles, so that the digits of x serve all of these.
    params.tiles = tiles;
    const uint32_t warps = std::min(one_warps, divide_up(m.columns, part_columns));
    const uint32_t at_once = std::clamp(processors * (one_warps / warps) / (blocks * count), 1u, tiles);
    launch(kernel, {at_once, blocks, count}, lanes * warps, params);
  }
  const auto keeps = [&](const Product& product) {
    return keeps_digits(made, address<const float>(product.out), n * product.out_stride);
  };
  if (std::ranges::all_of(products, keeps)) made_ = made;
}

}  // namespace moeflux::cuda
