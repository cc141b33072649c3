// Products of matrices as stored, and the experts, which are made of them.
#include <algorithm>
#include <bit>
#include <cstring>

#include "gpu/products.h"
#include "metal/metal_commands.h"

namespace moeflux::metal {
namespace {

constexpr uint32_t outputs_of_group = outputs_of_simdgroup * product_simdgroups;

uint32_t number_of(const QuantFormat& format) {
  const DType type = format.is_quantised() ? format.scale_type : format.element;
  if (type == DType::u8) return number_u8;
  if (type == DType::f8_e4m3) return format.row_scale_bytes ? number_e4m3_of_rows : number_e4m3;
  return type == DType::bf16 ? number_bf16 : type == DType::f16 ? number_f16 : number_f32;
}

uint32_t group_shift_of(const QuantFormat& format) {
  return format.is_quantised() ? static_cast<uint32_t>(std::countr_zero(static_cast<uint32_t>(format.group_size))) : 0;
}

// The file of kernels, which begins with this, and what the names of kernels end with.
std::string file_of(const char* file, const QuantFormat& format) {
  return concat(file, format.is_blocks() ? "_blocks" : "");
}
std::string codes_of(const QuantFormat& format) {
  if (format.is_blocks()) return format.describe();
  if (format.has_float_codes()) return concat(format.bits == 4 ? e2m1 : e4m3);
  return concat(format.bits);
}

double multiplications(const Matrix& matrix, int64_t rows) {
  return static_cast<double>(matrix.rows) * static_cast<double>(matrix.columns) * static_cast<double>(rows);
}

}  // namespace

void MetalCommands::embed(const Matrix& table, View ids, View out, int64_t n) {
  op("embed", [&] {
    const EmbedParams params = {.columns = static_cast<uint32_t>(table.columns),
                                .group_shift = group_shift_of(table.format),
                                .number = number_of(table.format)};
    flat({file_of("matmul", table.format), concat("embed_", codes_of(table.format))}, params,
         {table.weight, or_nothing(table.scales), or_nothing(table.biases), ids, out}, divide_up(table.columns, pack),
         n);
  });
}

void MetalCommands::matmul(std::span<const Product> products, int64_t n) {
  op("matmul", [&] {
    if (n == 0) return;
    while (!products.empty()) {
      const size_t count = gpu::evenly_apart(products);
      multiply(products.first(count), n);
      products = products.subspan(count);
    }
  });
}

void MetalCommands::multiply(std::span<const Product> batch, int64_t n) {
  const Product& first = batch.front();
  const Matrix& m = first.matrix;
  const gpu::Step step = batch.size() > 1 ? gpu::step_between(first, batch[1]) : gpu::Step{};
  const ProductParams params = {.x_batch = static_cast<uint64_t>(step.x / 4),
                                .out_batch = static_cast<uint64_t>(step.out / 4),
                                .batch_rows = static_cast<uint32_t>(step.rows),
                                .rows = static_cast<uint32_t>(m.rows),
                                .columns = static_cast<uint32_t>(m.columns),
                                .n = static_cast<uint32_t>(n),
                                .x_stride = static_cast<uint32_t>(first.x_stride),
                                .out_stride = static_cast<uint32_t>(first.out_stride),
                                .group_shift = group_shift_of(m.format),
                                .number = number_of(m.format)};
  const std::initializer_list<View> buffers = {m.weight, or_nothing(m.scales), or_nothing(m.biases), first.x,
                                               first.out};
  const auto count = static_cast<int64_t>(batch.size());
  if (first.transposed) {
    flat({file_of("matmul", m.format), concat("matmul_transposed_", codes_of(m.format))}, params, buffers,
         divide_up(m.columns, pack), n, count);
  } else {
    const int64_t rows = n == 1 ? 1 : product_rows;
    dispatch({file_of("matmul", m.format), concat(n == 1 ? "matvec_" : "matmul_", codes_of(m.format))}, params, buffers,
             {divide_up(m.rows, outputs_of_group), divide_up(n, rows), static_cast<uint32_t>(count)});
  }
  did(multiplications(m, n * count));
}

// ---- Experts --------------------------------------------------------------------------------------------------------

struct MetalCommands::Lists {
  View blocks;
  View pairs;
  int64_t count = 0;  // of blocks
  int64_t rows = 0;   // of a block: 1, or product_rows
  int64_t total = 0;  // pairs
};

int64_t MetalCommands::list_bytes(int64_t pairs, int64_t jobs) {
  const int64_t blocks = pairs / product_rows + jobs;  // or as many as pairs, if no block has more than one
  return pairs * 4 + std::max(blocks, std::min(pairs, jobs)) * static_cast<int64_t>(sizeof(ExpertBlock)) + 32;
}

View MetalCommands::room_for(int64_t bytes, ListRing& ring) {
  constexpr int64_t min_room = 1 << 16;
  if (ring.capacity() < 2 * bytes) ring.reserve(backend_, std::max(min_room, 4 * bytes));
  std::optional<View> room = ring.take(bytes, *backend_.flight_);
  if (!room) {  // this batch itself has all of it
    commit();
    room = ring.take(bytes, *backend_.flight_);
  }
  return *room;
}

MetalCommands::Lists MetalCommands::lists_of(const ExpertArgs& args) {
  Lists lists;
  int64_t longest = 0;
  for (const ExpertJob& job : args.jobs) {
    lists.total += job.count;
    longest = std::max(longest, job.count);
  }
  lists.rows = longest > 1 ? product_rows : 1;
  for (const ExpertJob& job : args.jobs) lists.count += divide_up(job.count, lists.rows);
  if (lists.count == 0) return lists;
  const int64_t block_bytes = lists.count * static_cast<int64_t>(sizeof(ExpertBlock));
  lists.blocks = room_for(block_bytes + lists.total * 4, backend_.lists_);
  lists.pairs = lists.blocks.at(block_bytes, 1);
  auto* block = reinterpret_cast<ExpertBlock*>(lists.blocks.bytes());
  uint32_t written = 0;
  for (const ExpertJob& job : args.jobs) {
    const auto slot = static_cast<uint64_t>(gpu::base_of(job.expert));
    for (int64_t at = 0; at < job.count; at += lists.rows)
      *block++ = {slot, written + static_cast<uint32_t>(at),
                  static_cast<uint32_t>(std::min(lists.rows, job.count - at)), static_cast<uint32_t>(job.index), 0};
    std::memcpy(lists.pairs.i32() + written, job.pairs, static_cast<size_t>(job.count) * 4);
    written += static_cast<uint32_t>(job.count);
  }
  return lists;
}

// out[p] = W . x[p / k] for every pair; with a second matrix silu(W . x) * (V . x), or what is in its place. `base`:
// the first byte of the expert that these matrices are of; all are laid out as it is.
void MetalCommands::product_of_experts(const char* kernel, const Lists& lists, int64_t base, const Matrix& matrix,
                                       const Second& second, View bias, int64_t k, View x, View out) {
  const auto place = [&](const View& view) { return view ? static_cast<uint64_t>(view.offset - base) : 0; };
  const Matrix& other = second.matrix ? *second.matrix : matrix;
  const ExpertParams params = {.weight = place(matrix.weight),
                               .scales = place(matrix.scales),
                               .biases = place(matrix.biases),
                               .up_weight = place(other.weight),
                               .up_scales = place(other.scales),
                               .up_biases = place(other.biases),
                               .rows = static_cast<uint32_t>(matrix.rows),
                               .columns = static_cast<uint32_t>(matrix.columns),
                               .group_shift = group_shift_of(matrix.format),
                               .number = number_of(matrix.format),
                               .k = static_cast<uint32_t>(k),
                               .has_bias = static_cast<bool>(bias),
                               .alpha = second.alpha,
                               .limit = second.limit,
                               .is_geglu = second.is_geglu};
  const View slots = {matrix.weight.buffer, 0};
  const Kernel name = {file_of("experts", matrix.format),
                       concat(kernel, lists.rows == 1 ? "_1_" : "_", codes_of(matrix.format))};
  const Extent grid = {divide_up(matrix.rows, outputs_of_group), static_cast<uint32_t>(lists.count)};
  if (second.matrix)
    dispatch(name, params, {lists.blocks, lists.pairs, slots, x, or_nothing(bias), or_nothing(second.bias), out}, grid);
  else
    dispatch(name, params, {lists.blocks, lists.pairs, slots, x, or_nothing(bias), out}, grid);
  did(multiplications(matrix, lists.total) * (second.matrix ? 2 : 1));
}

void MetalCommands::feed_forward(const Lists& lists, const ExpertMatrices& e, int64_t base, const ExpertArgs& args) {
  const ExpertFlavour& f = args.flavour;
  gpu::feed_forward(
      e, args,
      [&](const char* kernel, const Matrix& matrix, const Second& second, View bias, int64_t k, View x, View out) {
        product_of_experts(kernel, lists, base, matrix, second, bias, k, x, out);
      },
      [&](View gate, View up, int64_t count) {
        const auto numbers = static_cast<uint32_t>(count);
        if (f.limit > 0)
          flat({"elementwise", "clamped_swiglu_of"}, ClampedParams{numbers, f.alpha, f.limit}, {gate, up}, count);
        else
          flat({"elementwise", f.geglu ? "geglu" : "swiglu"}, FlatParams{numbers}, {gate, up}, count);
      },
      [&] { barrier(); });
}

void MetalCommands::expert_ffn(const ExpertArgs& args) {
  op("expert_ffn", [&] {
    const Lists lists = lists_of(args);
    if (lists.count == 0) return;
    const ExpertMatrices& expert = args.jobs.front().expert;
    feed_forward(lists, expert, gpu::base_of(expert), args);
  });
}

// The GPU makes the lists itself.
void MetalCommands::chosen_expert_ffn(const ChosenExpertArgs& args, int64_t n) {
  op("chosen_expert_ffn", [&] {
    const int64_t pairs = n * args.k;
    if (pairs == 0) return;
    constexpr auto block_bytes = static_cast<int64_t>(sizeof(ExpertBlock));
    for (auto& [buffer, bytes] :
         {std::pair{&backend_.chosen_blocks_, pairs * block_bytes}, std::pair{&backend_.chosen_pairs_, pairs * 4}})
      if (!*buffer || (*buffer)->bytes() < bytes) *buffer = backend_.allocate(bytes, Memory::device, "chosen experts");
    const Lists lists = {{backend_.chosen_blocks_.get(), 0}, {backend_.chosen_pairs_.get(), 0}, pairs, 1, pairs};
    flat({"experts", "expert_blocks"}, ExpertBlocksParams{static_cast<uint32_t>(pairs)},
         {args.ids, args.slots, lists.blocks, lists.pairs}, pairs);
    barrier();
    feed_forward(lists, args.first, 0,
                 {args.x, n, args.hidden, args.intermediate, args.k, {}, args.scratch, args.out, args.flavour});
  });
}

}  // namespace moeflux::metal
