// Products of matrices as stored, and the experts, which are made of them. And the room that ops need.
#include <algorithm>
#include <cstring>
#include <optional>

#include "core/error.h"
#include "cuda/cuda_commands.h"

namespace moeflux::cuda {
namespace {

constexpr uint32_t blocks_of_multiprocessor = 4;  // that go through the tiles of one row's product

uint32_t number_of(const QuantFormat& format) {
  const DType type = format.is_affine() ? format.scale_type : format.element;
  return type == DType::bf16 ? number_bf16 : type == DType::f16 ? number_f16 : number_f32;
}

uint32_t group_steps_of(const QuantFormat& format) {
  return format.is_affine() ? static_cast<uint32_t>(format.group_size) / step_columns : 1;
}

StoredMatrix stored(const Matrix& m) {
  return {address<const uint8_t>(m.weight), address<const uint8_t>(m.scales), address<const uint8_t>(m.biases)};
}

bool same_shape(const Product& a, const Product& b) {
  return a.matrix.format == b.matrix.format && a.matrix.rows == b.matrix.rows && a.matrix.columns == b.matrix.columns &&
         a.transposed == b.transposed && a.x_stride == b.x_stride && a.out_stride == b.out_stride &&
         a.x.buffer == b.x.buffer && a.out.buffer == b.out.buffer && a.matrix.weight.buffer == b.matrix.weight.buffer;
}

// How far apart two products of one shape are: x and out in bytes, the matrix in rows, or -1 if that is no whole
// number.
struct Step {
  int64_t x = 0;
  int64_t out = 0;
  int64_t rows = 0;

  bool operator==(const Step&) const = default;
};

Step step_between(const Product& a, const Product& b) {
  const QuantFormat& format = a.matrix.format;
  const int64_t row = format.weight_row_bytes(a.matrix.columns);
  const int64_t weight = b.matrix.weight.offset - a.matrix.weight.offset;
  const int64_t rows = weight / row;
  const int64_t scales = rows * format.scale_row_bytes(a.matrix.columns);
  const bool whole = rows * row == weight && b.matrix.scales.offset - a.matrix.scales.offset == scales &&
                     b.matrix.biases.offset - a.matrix.biases.offset == scales;
  return {b.x.offset - a.x.offset, b.out.offset - a.out.offset, whole ? rows : -1};
}

// How many products, from the first on, are evenly apart, as those of the heads of a stack are. They take one launch.
size_t batch_of(std::span<const Product> products) {
  if (products.size() < 2 || !same_shape(products[0], products[1])) return 1;
  const Step step = step_between(products[0], products[1]);
  if (step.x < 0 || step.out <= 0 || step.rows < 0) return 1;
  size_t count = 2;
  while (count < products.size() && same_shape(products[0], products[count]) &&
         step_between(products[count - 1], products[count]) == step)
    ++count;
  return count;
}

// A warp for each part of the columns, up to the most that a block has.
uint32_t product_threads(int64_t columns, uint32_t most = product_warps) {
  return lanes * std::min(most, divide_up(columns, part_columns));
}

bool is_aligned(const std::byte* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; }

// Formats with kernels of their own, if codes are aligned. These take more rows together, too.
bool is_known(const QuantFormat& format) {
  return (format.bits == 4 && format.group_size <= 64) || (format.bits == 8 && format.group_size == 64);
}

// The end of a kernel's name.
std::string format_name(const QuantFormat& format, bool codes_are_aligned) {
  return is_known(format) && codes_are_aligned ? concat(format.bits, "_", format.group_size) : concat(format.bits);
}

// The rows of x that a block takes together.
int64_t rows_of_block(const QuantFormat& format, int64_t n, bool codes_are_aligned) {
  if (n == 1) return 1;
  if (!format.is_affine()) return plain_rows;
  return n > 2 * few_rows && is_known(format) && codes_are_aligned ? many_rows : few_rows;
}
const char* kind_of(int64_t rows) { return rows == 1 ? "_one_" : rows == many_rows ? "_many_" : "_few_"; }

// Whether one launch can multiply the row of x with both.
bool go_together(const Product& a, const Product& b) {
  return a.matrix.format == b.matrix.format && a.matrix.columns == b.matrix.columns && !b.transposed &&
         a.x.buffer == b.x.buffer && a.x.offset == b.x.offset;
}

int64_t digit_bytes(int64_t fragments, int64_t columns) {
  return fragments * fragment_rows * columns * digits_of_number;
}
int64_t group_bytes(int64_t fragments, int64_t groups) {
  return fragments * fragment_rows * groups * static_cast<int64_t>(sizeof(DigitGroup));
}

}  // namespace

// ---- Room -----------------------------------------------------------------------------------------------------------

std::vector<RoomSize> CudaCommands::rooms(const WorkSizes& sizes) {
  std::vector<RoomSize> rooms(room_count);
  constexpr int64_t parts_of_row = 256;  // more of them take the room of fewer rows
  rooms[parts] = {"attention", sizes.value_dim ? sizes.heads * (sizes.value_dim + 2) * 4 * parts_of_row : 0};
  // The digits of a step's inputs, or of the pairs of all experts, each of which has a block that is not full.
  const int64_t width = sizes.input_rows ? divide_up(sizes.inputs, sizes.input_rows) : 0;
  const int64_t rows = sizes.rows > 1 ? sizes.input_rows + sizes.pairs +
                                            std::min(sizes.pairs, sizes.products) * (many_rows - 1) + many_rows
                                      : 0;
  const int64_t fragments = divide_up(rows, fragment_rows);
  rooms[digits] = {"digits", digit_bytes(fragments, width)};
  rooms[groups] = {"digits", group_bytes(fragments, divide_up(width, step_columns))};
  const int64_t blocks = divide_up(sizes.logits, top_k_block);
  for (const size_t room : {picked_values, picked_ids})
    for (size_t round = 0; round < 2; ++round)
      rooms[room + round] = {"top-k", blocks > 1 ? blocks * std::min(sizes.picks, sizes.logits) * 4 : 0};
  return rooms;
}

int64_t CudaCommands::list_bytes(const WorkSizes& sizes) {
  constexpr int64_t alignment = 16;
  const int64_t blocks = sizes.pairs + sizes.products;
  const int64_t rows = static_cast<int64_t>(sizeof(CachedRows)) + sizes.row_blocks * 8;
  return sizes.pairs * 4 + blocks * static_cast<int64_t>(sizeof(ExpertBlock)) + rows + 3 * alignment;
}

// ---- Products -------------------------------------------------------------------------------------------------------

// Of which x the digits were made last.
struct CudaCommands::Digits {
  std::optional<DigitsParams> made;
  int64_t batch = 0;
};

void CudaCommands::embed(const Matrix& table, View ids, View out, int64_t n) {
  op("embed", [&] {
    const EmbedParams params = {.table = stored(table),
                                .ids = address<const int>(ids),
                                .out = address<float>(out),
                                .columns = static_cast<uint32_t>(table.columns),
                                .group_steps = group_steps_of(table.format),
                                .number = number_of(table.format),
                                .n = static_cast<uint32_t>(n)};
    flat(concat("embed_", table.format.bits), params, divide_up(table.columns, pack), n);
  });
}

void CudaCommands::matmul(std::span<const Product> products, int64_t n) {
  op("matmul", [&] {
    if (n == 0) return;
    Digits made;
    while (!products.empty()) {
      const Product& first = products.front();
      size_t count = 1;
      if (n == 1 && !first.transposed && first.matrix.format.is_affine())
        while (count < std::min<size_t>(most_outputs, products.size()) && go_together(first, products[count])) ++count;
      const size_t evenly = batch_of(products);
      if (count >= evenly && n == 1 && !first.transposed && first.matrix.format.is_affine()) {
        multiply_row(products.first(count));
      } else {
        count = evenly;
        multiply(products.first(count), n, made);
      }
      products = products.subspan(count);
    }
  });
}

void CudaCommands::multiply_row(std::span<const Product> products) {
  const Product& first = products.front();
  OneRowParams params = {.matrices = {},
                         .out = {},
                         .x = address<const float>(first.x),
                         .rows = {},
                         .first_tile = {},
                         .tiles = 0,
                         .columns = static_cast<uint32_t>(first.matrix.columns),
                         .group_steps = group_steps_of(first.matrix.format),
                         .number = number_of(first.matrix.format)};
  bool aligned = true;
  for (size_t i = 0; i < products.size(); ++i) {
    const Product& product = products[i];
    params.matrices[i] = stored(product.matrix);
    params.out[i] = address<float>(product.out);
    params.rows[i] = static_cast<uint32_t>(product.matrix.rows);
    params.first_tile[i] = params.tiles;
    params.tiles += divide_up(product.matrix.rows, tile_rows);
    aligned = aligned && is_aligned(product.matrix.weight.bytes());
  }
  for (size_t i = products.size(); i < most_outputs; ++i) params.first_tile[i] = params.tiles;
  // Blocks of as many tiles each, all of them on the chip at once. A few tiles are done by larger blocks.
  const uint32_t processors = launches_.chip().multiprocessors;
  const uint32_t tiles_of_block = divide_up(params.tiles, int64_t{blocks_of_multiprocessor} * processors);
  const uint32_t warps = params.tiles <= 2 * processors ? one_warps : product_warps;
  launch(concat("matmul_one_", format_name(first.matrix.format, aligned)), {divide_up(params.tiles, tiles_of_block)},
         product_threads(params.columns, warps), params);
}

void CudaCommands::multiply(std::span<const Product> batch, int64_t n, Digits& made) {
  const Product& first = batch.front();
  const Matrix& m = first.matrix;
  const Step step = batch.size() > 1 ? step_between(first, batch[1]) : Step{};
  const auto count = static_cast<uint32_t>(batch.size());
  ProductParams params = {.matrix = stored(m),
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
                          .number = number_of(m.format)};
  if (first.transposed)
    return flat(concat("matmul_transposed_", m.format.bits), params, divide_up(m.columns, pack), n, count);
  const bool aligned = is_aligned(m.weight.bytes()) && step.rows * m.format.weight_row_bytes(m.columns) % 16 == 0;
  const int64_t rows = rows_of_block(m.format, n, aligned);
  const std::string kernel =
      concat(rows == 1 ? "matmul_each_" : concat("matmul", kind_of(rows)), format_name(m.format, aligned));
  if (!m.format.is_affine())
    return launch(kernel, {divide_up(m.rows, plain_outputs * plain_warps), divide_up(n, rows), count},
                  plain_warps * lanes, params);
  const uint32_t tiles = divide_up(m.rows, tile_rows);
  if (rows == 1) return launch(kernel, {tiles, 1, count}, product_threads(m.columns), params);
  const uint32_t blocks = divide_up(n, rows);
  params.batch_fragments = blocks * static_cast<uint32_t>(rows / fragment_rows);
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
                               .k = 1};
  if (!made.made || made.batch != count || std::memcmp(&*made.made, &making, sizeof making) != 0) {
    launch("make_digits", {params.batch_fragments, 1, count}, fragment_rows * lanes, making);
    made = {making, count};
  }
  launch(kernel, {tiles, blocks, count}, product_threads(m.columns), params);
}

// ---- Experts --------------------------------------------------------------------------------------------------------

struct CudaCommands::Lists {
  const ExpertBlock* blocks = nullptr;
  const uint32_t* pairs = nullptr;
  // Instead, if the router's choice is on the device:
  const uint8_t* slots = nullptr;
  const uint64_t* slot_of = nullptr;
  const int* ids = nullptr;

  int64_t count = 0;         // of blocks
  int64_t rows = 0;          // of a block
  bool are_aligned = false;  // all slots, to 16 bytes
};

// The first byte of an expert.
static int64_t base_of(const ExpertMatrices& expert) {
  int64_t base = expert.gate.weight.offset;
  for (const Matrix* matrix : {&expert.gate, &expert.up, &expert.down})
    for (const View& view : {matrix->weight, matrix->scales, matrix->biases})
      if (view) base = std::min(base, view.offset);
  return base;
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
  const int64_t base = base_of(first);
  lists.are_aligned = std::ranges::all_of(args.jobs, [](const ExpertJob& job) {
    return is_aligned(View{job.expert.gate.weight.buffer, base_of(job.expert)}.bytes());
  });
  for (const Matrix* matrix : {&first.gate, &first.up, &first.down})
    lists.are_aligned = lists.are_aligned && (matrix->weight.offset - base) % 16 == 0;
  // Where experts have hardly more than a pair each, blocks of several would be empty.
  if (total < 3 * std::ssize(args.jobs)) longest = 1;
  lists.rows = many_rows;  // all three have blocks of one size
  for (const Matrix* matrix : {&first.gate, &first.up, &first.down})
    lists.rows = std::min(lists.rows, rows_of_block(matrix->format, longest, lists.are_aligned));
  for (const ExpertJob& job : args.jobs) lists.count += divide_up(job.count, lists.rows);
  const List blocks = launches_.list(lists.count * static_cast<int64_t>(sizeof(ExpertBlock)));
  const List pairs = launches_.list(total * 4);
  auto* block = blocks.values<ExpertBlock>();
  uint32_t written = 0;
  for (const ExpertJob& job : args.jobs) {
    const View slot = {job.expert.gate.weight.buffer, base_of(job.expert)};
    for (int64_t at = 0; at < job.count; at += lists.rows)
      *block++ = {address<const uint8_t>(slot), written + static_cast<uint32_t>(at),
                  static_cast<uint32_t>(std::min(lists.rows, job.count - at))};
    std::memcpy(pairs.values<uint32_t>() + written, job.pairs, static_cast<size_t>(job.count) * 4);
    written += static_cast<uint32_t>(job.count);
  }
  lists.blocks = reinterpret_cast<const ExpertBlock*>(blocks.device);
  lists.pairs = reinterpret_cast<const uint32_t*>(pairs.device);
  return lists;
}

// out[p] = W . x[p / k] for every pair; with a second matrix silu(W . x) * (V . x). `base`: the first byte of the
// expert that these matrices are of; all are laid out as it is.
void CudaCommands::product_of_experts(const char* name, const Lists& lists, int64_t base, const Matrix& matrix,
                                      const Matrix* second, int64_t k, View x, View out) {
  const auto place = [&](const View& view) { return view ? static_cast<uint64_t>(view.offset - base) : 0; };
  const auto places = [&](const Matrix& m) { return ExpertMatrix{place(m.weight), place(m.scales), place(m.biases)}; };
  const bool is_affine = matrix.format.is_affine();
  ExpertParams params = {.matrix = places(matrix),
                         .second = places(second ? *second : matrix),
                         .slots = lists.slots,
                         .slot_of = lists.slot_of,
                         .ids = lists.ids,
                         .blocks = lists.blocks,
                         .pairs = lists.pairs,
                         .x = address<const float>(x),
                         .digits = nullptr,
                         .groups = nullptr,
                         .out = address<float>(out),
                         .rows = static_cast<uint32_t>(matrix.rows),
                         .columns = static_cast<uint32_t>(matrix.columns),
                         .group_steps = group_steps_of(matrix.format),
                         .number = number_of(matrix.format),
                         .k = static_cast<uint32_t>(k)};
  const bool aligned = lists.are_aligned && params.matrix.codes % 16 == 0 && params.second.codes % 16 == 0;
  const std::string kernel = concat(name, kind_of(lists.rows), format_name(matrix.format, aligned));
  const auto blocks = static_cast<uint32_t>(lists.count);
  if (!is_affine)
    return launch(kernel, {divide_up(matrix.rows, plain_outputs * plain_warps), blocks}, plain_warps * lanes, params);
  if (lists.rows > 1) {
    const uint32_t of_block = divide_up(lists.rows, fragment_rows);
    const int64_t fragments = int64_t{blocks} * of_block;
    auto* made = room<uint8_t>(digits, digit_bytes(fragments, matrix.columns));
    auto* made_groups = room<DigitGroup>(groups, group_bytes(fragments, matrix.columns / matrix.format.group_size));
    launch("make_digits", {static_cast<uint32_t>(fragments)}, fragment_rows * lanes,
           DigitsParams{.x = params.x,
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
                        .k = params.k});
    params.digits = made;
    params.groups = made_groups;
  }
  const int64_t outputs = second ? tile_rows / 2 : tile_rows;  // of a tile
  launch(kernel, {divide_up(matrix.rows, outputs), blocks}, product_threads(matrix.columns), params);
}

void CudaCommands::feed_forward(const Lists& lists, const ExpertMatrices& e, int64_t base, const ExpertArgs& args) {
  if (e.gate.format == e.up.format) {
    product_of_experts("expert_gate_up", lists, base, e.gate, &e.up, args.k, args.x, args.scratch);
  } else {  // each by itself; scratch has room for both, with a row for each pair of the call
    const int64_t count = args.rows * args.k * args.intermediate;
    const View up = args.scratch.at(count);
    product_of_experts("expert_down", lists, base, e.gate, nullptr, args.k, args.x, args.scratch);
    product_of_experts("expert_down", lists, base, e.up, nullptr, args.k, args.x, up);
    flat("swiglu", FlatParams{address<float>(args.scratch), address<const float>(up), static_cast<uint64_t>(count)},
         count);
  }
  product_of_experts("expert_down", lists, base, e.down, nullptr, 1, args.scratch, args.out);
}

void CudaCommands::expert_ffn(const ExpertArgs& args) {
  op("expert_ffn", [&] {
    const Lists lists = lists_of(args);
    if (lists.count == 0) return;
    const ExpertMatrices& expert = args.jobs.front().expert;
    feed_forward(lists, expert, base_of(expert), args);
  });
}

// Each pair has a block of its own, and finds its expert itself.
void CudaCommands::chosen_expert_ffn(const ChosenExpertArgs& args, int64_t n) {
  op("chosen_expert_ffn", [&] {
    const int64_t pairs = n * args.k;
    if (pairs == 0) return;
    Lists lists;
    lists.slots = address<const uint8_t>({args.first.gate.weight.buffer, 0});
    lists.slot_of = address<const uint64_t>(args.slots);
    lists.ids = address<const int>(args.ids);
    lists.count = pairs;
    lists.rows = 1;
    lists.are_aligned = true;  // or the kernel sees that they are not
    feed_forward(lists, args.first, 0, {args.x, n, args.hidden, args.intermediate, args.k, {}, args.scratch, args.out});
  });
}

}  // namespace moeflux::cuda
