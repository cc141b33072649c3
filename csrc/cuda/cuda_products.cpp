// Products of matrices as stored, and the experts, which are made of them. And the room that ops need.
#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>

#include "core/error.h"
#include "cuda/cuda_commands.h"
#include "gpu/products.h"

namespace moeflux::cuda {
namespace {

uint32_t number_of(const QuantFormat& format) {
  const DType type = format.is_quantised() ? format.scale_type : format.element;
  if (type == DType::u8) return number_u8;
  if (type == DType::f8_e4m3) return format.row_scale_bytes ? number_e4m3_of_rows : number_e4m3;
  return type == DType::bf16 ? number_bf16 : type == DType::f16 ? number_f16 : number_f32;
}

// Whether tensor cores multiply its codes with digits of x. Of others, codes become f32.
bool has_digits(const QuantFormat& format) { return format.is_affine() || format.is_mxfp4(); }

uint32_t group_steps_of(const QuantFormat& format) {
  return has_digits(format) ? static_cast<uint32_t>(format.group_size) / step_columns : 1;
}

StoredMatrix stored(const Matrix& m) {
  return {address<const uint8_t>(m.weight), address<const uint8_t>(m.scales), address<const uint8_t>(m.biases)};
}

// A warp for each part of the columns, up to the most that a block has.
uint32_t product_threads(int64_t columns) { return lanes * std::min(product_warps, divide_up(columns, part_columns)); }

bool is_aligned(const std::byte* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; }

// Formats with kernels of their own, for matrices that are aligned. These take more rows together, too.
bool is_known(const QuantFormat& format) {
  if (format.is_mxfp4()) return true;
  return format.is_affine() && format.scale_type != DType::f32 &&
         ((format.bits == 4 && format.group_size <= 64) || (format.bits == 8 && format.group_size == 64));
}
// Where codes, and all scales of a part, may be loaded together. Nothing of MXFP4 is. `base`: where the matrix is
// counted from.
bool is_aligned(const Matrix& matrix, int64_t base) {
  if (matrix.format.is_mxfp4()) return true;
  const auto divides = [&](const View& view, int64_t by) { return !view || (view.offset - base) % by == 0; };
  return matrix.columns % part_columns == 0 && divides(matrix.weight, 16) && divides(matrix.scales, 8) &&
         divides(matrix.biases, 8);
}
bool is_aligned(const Matrix& matrix) { return is_aligned(matrix.weight.buffer->data()) && is_aligned(matrix, 0); }

// The end of a kernel's name.
std::string bits_name(const QuantFormat& format) {
  if (format.is_blocks()) return format.describe();
  if (!format.has_float_codes()) return concat(format.bits);
  return concat(format.bits == 8 ? e4m3 : format.is_mxfp4() ? e2m1 : nvfp4);
}
std::string format_name(const QuantFormat& format, bool aligned) {
  const bool has_own = is_known(format) && aligned && !format.is_mxfp4();
  return has_own ? concat(bits_name(format), "_", format.group_size) : bits_name(format);
}

// The rows of x that a block takes together.
int64_t rows_of_block(const QuantFormat& format, int64_t n, bool aligned) {
  if (n == 1) return 1;
  if (!format.is_quantised()) return plain_rows;
  if (!has_digits(format)) return few_rows;
  return n > 2 * few_rows && is_known(format) && aligned ? many_rows : few_rows;
}
const char* kind_of(int64_t rows) { return rows == 1 ? "_one_" : rows == many_rows ? "_many_" : "_few_"; }

// The outputs of a block where x has no digits.
int64_t plain_outputs_of(const QuantFormat& format, int64_t rows) {
  return plain_warps * int64_t{rows == 1 && format.is_quantised() ? one_outputs : plain_outputs};
}

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
  constexpr int64_t session_lists = 1 << 15;  // of what each of a few sessions has in each layer
  const int64_t blocks = sizes.pairs + sizes.products;
  const int64_t rows = static_cast<int64_t>(sizeof(CachedRows)) + sizes.row_blocks * 8;
  return sizes.pairs * 4 + blocks * static_cast<int64_t>(sizeof(ExpertBlock)) + rows + session_lists + 3 * alignment;
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
    flat("embed_" + bits_name(table.format), params, divide_up(table.columns, pack), n);
  });
}

void CudaCommands::matmul(std::span<const Product> products, int64_t n) {
  op("matmul", [&] {
    if (n == 0) return;
    Digits made;
    while (!products.empty()) {
      const Product& first = products.front();
      size_t count = 1;
      if (n == 1 && !first.transposed && has_digits(first.matrix.format))
        while (count < std::min<size_t>(most_outputs, products.size()) && go_together(first, products[count])) ++count;
      const size_t evenly = gpu::evenly_apart(products);
      if (count >= evenly && n == 1 && !first.transposed && has_digits(first.matrix.format)) {
        multiply_row(products.first(count));
      } else {
        count = evenly;
        multiply(products.first(count), n, made);
      }
      products = products.subspan(count);
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
                         .residual = nullptr,
                         .rows = {},
                         .first_tile = {},
                         .tiles = 0,
                         .columns = static_cast<uint32_t>(first.matrix.columns),
                         .group_steps = group_steps_of(first.matrix.format),
                         .number = number_of(first.matrix.format),
                         .is_gated = false,
                         .eps = 0};
  bool aligned = true;
  for (size_t i = 0; i < products.size(); ++i) {
    const Product& product = products[i];
    params.matrices[i] = stored(product.matrix);
    params.out[i] = address<float>(product.out);
    params.rows[i] = static_cast<uint32_t>(product.matrix.rows);
    aligned = aligned && is_aligned(product.matrix);
  }
  takes_norm(params, products);
  wait_with(RowProduct{concat("matmul_one_", format_name(first.matrix.format, aligned)), params, products.size()});
}

void CudaCommands::multiply(std::span<const Product> batch, int64_t n, Digits& made) {
  const Product& first = batch.front();
  const Matrix& m = first.matrix;
  const gpu::Step step = batch.size() > 1 ? gpu::step_between(first, batch[1]) : gpu::Step{};
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
    return flat("matmul_transposed_" + bits_name(m.format), params, divide_up(m.columns, pack), n, count);
  const bool aligned = is_aligned(m) && step.rows * m.format.weight_row_bytes(m.columns) % 16 == 0;
  const int64_t rows = rows_of_block(m.format, n, aligned);
  const std::string kernel =
      concat(rows == 1 ? "matmul_each_" : concat("matmul", kind_of(rows)), format_name(m.format, aligned));
  if (!has_digits(m.format))
    return launch(kernel, {divide_up(m.rows, plain_outputs_of(m.format, rows)), divide_up(n, rows), count},
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
    launch("make_digits", {params.batch_fragments, divide_up(m.columns, lanes * pack), count}, fragment_rows * lanes,
           making);
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
  lists.rows = many_rows;  // all three have blocks of one size
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

// out[p] = W . x[p / k] for every pair; with a second matrix silu(W . x) * (V . x), or what is in its place. `base`:
// the first byte of the expert that these matrices are of; all are laid out as it is.
void CudaCommands::product_of_experts(const char* name, const Lists& lists, int64_t base, const Matrix& matrix,
                                      const Second& second, View bias, int64_t k, View x, View out) {
  const auto place = [&](const View& view) { return view ? static_cast<uint64_t>(view.offset - base) : 0; };
  const auto places = [&](const Matrix& m) { return ExpertMatrix{place(m.weight), place(m.scales), place(m.biases)}; };
  ExpertParams params = {.matrix = places(matrix),
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
  const bool aligned =
      lists.are_aligned && is_aligned(matrix, base) && (!second.matrix || is_aligned(*second.matrix, base));
  const std::string kernel = concat(name, kind_of(lists.rows), format_name(matrix.format, aligned));
  const auto blocks = static_cast<uint32_t>(lists.count);
  if (!has_digits(matrix.format))
    return launch(kernel, {divide_up(matrix.rows, plain_outputs_of(matrix.format, lists.rows)), blocks},
                  plain_warps * lanes, params);
  if (lists.rows > 1) {
    const uint32_t of_block = divide_up(lists.rows, fragment_rows);
    const int64_t fragments = int64_t{blocks} * of_block;
    auto* made = room<uint8_t>(digits, digit_bytes(fragments, matrix.columns));
    auto* made_groups = room<DigitGroup>(groups, group_bytes(fragments, matrix.columns / matrix.format.group_size));
    launch("make_digits", {static_cast<uint32_t>(fragments), divide_up(matrix.columns, lanes * pack)},
           fragment_rows * lanes,
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
  const uint32_t tiles = divide_up(matrix.rows, second.matrix ? tile_rows / 2 : tile_rows);
  // Where each block has a pair, the digits of its row serve as many tiles as leave every processor its blocks.
  const uint32_t together = lists.rows > 1 ? 1 : std::min(tiles, tiles_together(int64_t{tiles} * blocks));
  launch(kernel, {divide_up(tiles, together), blocks}, product_threads(matrix.columns), params);
}

void CudaCommands::feed_forward(const Lists& lists, const ExpertMatrices& e, int64_t base, const ExpertArgs& args) {
  const ExpertFlavour& f = args.flavour;
  if (e.gate.format == e.up.format) {
    const Second up = {&e.up, f.up_bias, f.alpha, f.limit, f.geglu};
    product_of_experts("expert_gate_up", lists, base, e.gate, up, f.gate_bias, args.k, args.x, args.scratch);
  } else {  // each by itself; scratch has room for both, with a row for each pair of the call
    const int64_t count = args.rows * args.k * args.intermediate;
    const View up = args.scratch.at(count);
    product_of_experts("expert_down", lists, base, e.gate, {}, f.gate_bias, args.k, args.x, args.scratch);
    product_of_experts("expert_down", lists, base, e.up, {}, f.up_bias, args.k, args.x, up);
    const SwigluParams params = {address<float>(args.scratch),
                                 address<const float>(up),
                                 static_cast<uint64_t>(count),
                                 f.alpha,
                                 f.limit,
                                 f.geglu};
    flat("swiglu", params, count);
  }
  product_of_experts("expert_down", lists, base, e.down, {}, f.down_bias, 1, args.scratch, args.out);
}

void CudaCommands::expert_ffn(const ExpertArgs& args) {
  op("expert_ffn", [&] {
    const Lists lists = lists_of(args);
    if (lists.count == 0) return;
    const ExpertMatrices& expert = args.jobs.front().expert;
    feed_forward(lists, expert, gpu::base_of(expert), args);
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
    lists.are_aligned = args.alignment % 16 == 0 && is_aligned(View{args.first.gate.weight.buffer, 0}.bytes());
    feed_forward(lists, args.first, 0,
                 {args.x, n, args.hidden, args.intermediate, args.k, {}, args.scratch, args.out, args.flavour});
  });
}

}  // namespace moeflux::cuda
