// What goes together where there are some rows: in a step of several sessions, or of a short prompt. Rows become digits
// once, with the norm that makes them, and the tiles of a matrix come to shared memory once for all of them.
#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "cuda/stored_matrices.h"

namespace moeflux::cuda {
namespace {

constexpr uint32_t static_bytes = 1 << 10;   // that blocks have besides tiles and sums
constexpr uint32_t any_tiles = 1 << 20;      // whoever has room for so many has it for fewer
constexpr uint32_t most_sum_columns = 8192;  // of a row in shared memory

int64_t count_of(uint32_t n, uint32_t width) { return int64_t{n} * width; }

// How many tiles a block goes through, how many of them have a place at once, and how many are added up together. Two
// blocks on each multiprocessor, if there are so many tiles. Nothing if a tile has no room.
struct RowsRoom {
  uint32_t of_block;
  uint32_t places;
  uint32_t together;
  uint32_t bytes;
};
std::optional<RowsRoom> rows_room(uint32_t columns, uint32_t bits, uint32_t tiles, uint32_t fragments,
                                  const Chip& chip) {
  constexpr uint32_t most_at_once = 4, usual_together = 2;
  const uint32_t tile = tile_bytes(columns, bits);
  const uint32_t sums = columns / part_columns * tile_rows * few_rows * uint32_t{sizeof(float)};
  const bool has_registers = 2 * divide_up(columns / part_columns, copied_parts) <= copied_warps;  // for two blocks
  for (uint32_t blocks = has_registers && tiles * fragments > chip.multiprocessors ? 2 : 1; blocks > 0; --blocks) {
    const uint32_t all = chip.shared_bytes_beside(blocks) - static_bytes;
    const uint32_t of_block = divide_up(tiles * fragments, chip.multiprocessors * blocks);
    if (of_block <= most_at_once && of_block * (tile + sums) <= all)
      return RowsRoom{of_block, of_block, of_block, of_block * (tile + sums)};
    for (uint32_t together = usual_together; together > 0; --together) {
      if (all < 2 * together * sums) continue;
      const uint32_t fit = std::min((all - 2 * together * sums) / tile, copied_places);
      const uint32_t places = fit >= of_block ? of_block : std::bit_floor(fit);  // as the kernel has it
      if (places < together || (blocks > 1 && fit <= usual_together)) continue;
      return RowsRoom{of_block, places, together, places * tile + 2 * together * sums};
    }
  }
  return std::nullopt;
}

}  // namespace

// ---- What makes rows ------------------------------------------------------------------------------------------------

bool CudaCommands::sum_waits(const CombineParams& sum) {
  if (sum.n < 2 || sum.n > many_rows || !sum.residual || sum.hidden % part_columns != 0 ||
      sum.hidden > most_sum_columns)
    return false;
  for (const float* at : {sum.residual, sum.outputs, sum.shared, static_cast<const float*>(sum.out)})
    if (!is_aligned(at)) return false;
  wait_with(RowsSum{sum});
  return true;
}

bool CudaCommands::norm_waits(const NormParams& norm, int64_t n) {
  const int64_t count = n * norm.width;
  const auto meets = [&](const float* at, int64_t numbers) { return at && meet(norm.out, count, at, numbers); };
  if (n < 2 || n > int64_t{many_rows} || norm.width % part_columns != 0 || norm.width > most_sum_columns ||
      meets(norm.x, count))
    return false;
  for (const float* at : {norm.x, norm.weight, static_cast<const float*>(norm.out)})
    if (!is_aligned(at)) return false;
  RowsNorm rows = {norm, static_cast<uint32_t>(n)};
  if (const auto* added = std::get_if<RowsAdded>(&waiting_)) {
    const FlatParams& params = added->params;
    if (params.x == norm.x && params.count == static_cast<uint64_t>(count) && is_aligned(params.y) &&
        !meets(params.y, count) && !meet(params.x, count, params.y, count))
      rows.added = params;
  }
  if (const auto* sum = std::get_if<RowsSum>(&waiting_)) {
    const CombineParams& params = sum->params;
    if (params.out == norm.x && params.hidden == norm.width && params.n == n && !meets(params.residual, count) &&
        !meets(params.shared, count) && !meets(params.outputs, count * params.k))
      rows.sum = params;
  }
  if (rows.added || rows.sum) waiting_ = std::monostate();
  wait_with(std::move(rows));
  return true;
}

// What has come, one by one.
void CudaCommands::launch_rows_norm(const RowsNorm& norm) {
  const int64_t count = int64_t{norm.n} * norm.params.width;
  if (norm.sum) flat("combine", *norm.sum, count);
  if (norm.added) flat("residual_add", *norm.added, count);
  launch("rms_norm", {norm.n}, row_threads, norm.params);
}

bool CudaCommands::heads_wait(const HeadParams& heads) {
  if (takes_step_heads(heads)) return true;
  if (heads.n > many_rows || heads.dim != part_columns || heads.head_stride != heads.dim ||
      heads.row_stride != heads.heads * heads.dim)
    return false;
  wait_with(RowsHeads{heads});
  return true;
}

CudaCommands::RowsSource CudaCommands::take_source(const float* x, int64_t n, uint32_t columns, uint32_t stride) {
  RowsSource source;
  if (const auto* norm = std::get_if<RowsNorm>(&waiting_);
      norm && norm->params.out == x && norm->n == n && norm->params.width == columns && stride == columns)
    source = *norm;
  else if (const auto* heads = std::get_if<RowsHeads>(&waiting_);
           heads && heads->params.x == x && heads->params.n == n && heads->params.row_stride == columns &&
           stride == columns)
    source = *heads;
  else if (const auto* step = std::get_if<DeltaStep>(&waiting_);
           step && step->heads && step->heads->x == x && step->heads->n == n && step->heads->row_stride == columns &&
           stride == columns)
    source = *step;
  else if (const auto* gated = std::get_if<RowsGated>(&waiting_);
           gated && gated->params.gate == x && n <= int64_t{many_rows} && columns % part_columns == 0 &&
           gated->params.count == static_cast<uint64_t>(n) * columns && stride == columns && is_aligned(x) &&
           is_aligned(gated->params.up))
    source = *gated;
  else if (const auto* output = std::get_if<AttentionOutput>(&waiting_);
           output && output->params.out == x && int64_t{output->params.n} * std::ssize(output->sessions) == n &&
           n <= int64_t{many_rows} && output->params.heads * output->params.dim == columns && stride == columns &&
           output->makes_groups())
    source = *output;
  if (source.index() > 0) waiting_ = std::monostate();
  return source;
}

// Unless they are there, the digits of rows, with what makes these. Behind a source rows are new.
void CudaCommands::make_digits(const MadeDigits& wanted, const RowsSource& source) {
  const DigitsParams& params = wanted.params;
  const DigitRoom to = {params.digits, params.groups, params.in_halves, 0};
  if (const auto* norm = std::get_if<RowsNorm>(&source)) {
    const NormParams& of = norm->params;
    launch("norm_digits", {norm->n}, norm_threads,
           NormDigitsParams{.sum = norm->sum.value_or(CombineParams{}),
                            .to = to,
                            .x = of.x,
                            .added = norm->added ? norm->added->y : nullptr,
                            .kept = norm->sum     ? norm->sum->out
                                    : norm->added ? norm->added->x
                                                  : nullptr,
                            .weight = of.weight,
                            .normed = of.out,
                            .width = of.width,
                            .eps = of.eps},
           of.width * uint32_t{sizeof(float)});
  } else if (const auto* heads = std::get_if<RowsHeads>(&source)) {
    by_heads("heads_digits", HeadsDigitsParams{heads->params, to}, int64_t{heads->params.heads} * heads->params.n);
  } else if (const auto* step = std::get_if<DeltaStep>(&source)) {
    launch_step(*step, to);
  } else if (const auto* gated = std::get_if<RowsGated>(&source)) {
    launch("gated_digits", {divide_up(params.columns, row_threads * pack), params.n}, row_threads,
           GatedDigitsParams{to, gated->params.gate, gated->params.up, params.columns, 0});
  } else if (const auto* output = std::get_if<AttentionOutput>(&source)) {
    launch_attention(*output, to);
  } else {
    finish();
    if (made_ && made_->fragments == wanted.fragments && made_->batch == wanted.batch &&
        std::memcmp(&made_->params, &params, sizeof params) == 0)
      return;
    launch_digits(params, wanted.fragments, wanted.batch);
  }
  made_ = wanted;
}

// Whether digits stay what they are when something is written.
bool CudaCommands::keeps_digits(const MadeDigits& made, const float* out, int64_t count) {
  const DigitsParams& of = made.params;
  const auto rows = static_cast<int64_t>((made.batch - 1) * of.x_batch + uint64_t{of.n} * of.x_stride);
  return !meet(out, count, of.x, rows);
}

// ---- Products -------------------------------------------------------------------------------------------------------

// More than a fragment only where larger blocks would leave multiprocessors idle.
bool CudaCommands::may_be_rows(std::span<const Product> products, int64_t n) const {
  const Matrix& first = products.front().matrix;
  const Chip& chip = launches_.chip();
  int64_t rows = 0;
  for (const Product& product : products) rows += product.matrix.rows;
  return n <= int64_t{many_rows} &&
         (n <= int64_t{few_rows} || rows < int64_t{chip.multiprocessors} * many_warps * tile_rows) && chip.has(9) &&
         divide_up(first.columns, part_columns) <= copied_warps * copied_parts &&
         rows_room(static_cast<uint32_t>(first.columns), static_cast<uint32_t>(first.format.bits), any_tiles, 1,
                   chip) &&
         std::ranges::all_of(products, [](const Product& product) {
           return is_aligned(product.matrix) && may_be_copied(product.matrix, 0);
         });
}

bool CudaCommands::multiply_rows(std::span<const Product> products, int64_t n) {
  if (!may_be_rows(products, n)) return false;
  const Product& first = products.front();
  const auto columns = static_cast<uint32_t>(first.matrix.columns);
  RowsProduct product = {.params = {},
                         .count = products.size(),
                         .x = address<const float>(first.x),
                         .x_stride = static_cast<uint32_t>(first.x_stride)};
  RowsParams& params = product.params;
  params.columns = columns;
  params.number = number_of(first.matrix.format);
  params.n = static_cast<uint32_t>(n);
  params.gated = no_output;
  for (size_t i = 0; i < products.size(); ++i) {
    params.matrices[i] = stored(products[i].matrix);
    params.out[i] = address<float>(products[i].out);
    params.rows[i] = static_cast<uint32_t>(products[i].matrix.rows);
    params.out_stride[i] = static_cast<uint32_t>(products[i].out_stride);
    params.bits[i] = static_cast<uint32_t>(products[i].matrix.format.bits);
  }
  if (takes_rows_shared(product)) return true;
  product.source = take_source(product.x, n, columns, product.x_stride);
  wait_with(std::move(product));
  return true;
}

void CudaCommands::launch_rows(const RowsProduct& product) {
  RowsProduct own = product;
  RowsParams& params = own.params;
  const uint32_t fragments = divide_up(params.n, fragment_rows);
  auto* to = room<uint8_t>(digits, digit_bytes(fragments, params.columns));
  auto* to_groups = room<DigitGroup>(groups, group_bytes(fragments, params.columns / 64));
  params.digits = to;
  params.groups = to_groups;
  const MadeDigits made = {{.x = own.x,
                            .blocks = nullptr,
                            .pairs = nullptr,
                            .digits = to,
                            .groups = to_groups,
                            .x_batch = 0,
                            .x_stride = own.x_stride,
                            .columns = params.columns,
                            .group_steps = 64 / step_columns,
                            .n = params.n,
                            .block_fragments = 1,
                            .k = 1,
                            .in_halves = false,
                            .nothing = 0},
                           fragments,
                           1};
  make_digits(made, own.source);
  for (size_t i = 0; i < own.count; ++i) {
    params.first_tile[i] = params.tiles;
    const bool is_second = i > 0 && i - 1 == params.gated;  // its rows are in the tiles of the first
    if (!is_second) params.tiles += divide_up(params.rows[i], i == params.gated ? tile_rows / 2 : tile_rows);
  }
  for (size_t i = own.count; i < most_outputs; ++i) params.first_tile[i] = params.tiles;
  const auto [least, most] = std::ranges::minmax(std::span(params.bits).first(own.count));
  const RowsRoom room = *rows_room(params.columns, most, params.tiles, fragments, launches_.chip());
  params.places = room.places;
  params.together = room.together;
  launch(concat("rows_", least == most ? concat(most) : "4_and_8"), {divide_up(params.tiles, room.of_block), fragments},
         lanes * divide_up(params.columns / part_columns, copied_parts), params, room.bytes);
  bool keeps = !params.residual;
  for (size_t i = 0; i < own.count; ++i)
    keeps = keeps && keeps_digits(made, params.out[i], count_of(params.n, params.out_stride[i]));
  if (keeps) made_ = made;
}

// A product whose output is added to rows.
bool CudaCommands::takes_rows_residual(View x, View y, int64_t count) {
  auto* product = std::get_if<RowsProduct>(&waiting_);
  if (!product || product->count != 1 || product->params.residual) return false;
  RowsParams& params = product->params;
  auto* residual = address<float>(x);
  if (params.out[0] != address<float>(y) || params.out_stride[0] != params.rows[0] ||
      count != int64_t{params.n} * params.rows[0] || meet(residual, count, params.out[0], count))
    return false;
  params.residual = residual;
  return true;
}

// ---- The feed-forward part ------------------------------------------------------------------------------------------

bool CudaCommands::takes_rows_route(const RouteParams& route, int64_t n) {
  auto* product = std::get_if<RowsProduct>(&waiting_);
  if (!product || product->params.n != n || product->params.residual) return false;
  const RowsParams& params = product->params;
  const auto* end = params.out + product->count;
  const auto* logits = std::find(params.out, end, route.logits);
  if (logits == end || params.out_stride[logits - params.out] != route.experts) return false;
  waiting_ = RowsForward{std::move(*product), route};
  return true;
}

// Gate and up of the shared expert, which go before the choice, or its down, which goes behind it.
bool CudaCommands::takes_rows_shared(const RowsProduct& next) {
  auto* forward = std::get_if<RowsForward>(&waiting_);
  if (!forward || forward->down) return false;
  RowsProduct& products = forward->products;
  RowsParams& params = products.params;
  if (params.gated != no_output) {
    if (next.count != 1 || next.x != params.out[params.gated] || next.x_stride != params.out_stride[params.gated])
      return false;
    forward->down = next;
    return true;
  }
  if (next.count != 2 || products.count + 2 > most_outputs || next.x != products.x ||
      next.x_stride != products.x_stride || next.params.columns != params.columns || next.params.n != params.n ||
      next.params.number != params.number)
    return false;
  const RouteParams& route = forward->route;
  for (size_t i = 0; i < next.count; ++i) {
    const auto meets = [&](const float* at, uint32_t width) {
      return meet(next.params.out[i], count_of(params.n, next.params.out_stride[i]), at, count_of(params.n, width));
    };
    if (meets(route.logits, route.experts) || meets(reinterpret_cast<const float*>(route.ids), route.k) ||
        meets(route.weights, route.k))
      return false;
  }
  for (size_t i = 0; i < next.count; ++i, ++products.count) {
    params.matrices[products.count] = next.params.matrices[i];
    params.out[products.count] = next.params.out[i];
    params.rows[products.count] = next.params.rows[i];
    params.out_stride[products.count] = next.params.out_stride[i];
    params.bits[products.count] = next.params.bits[i];
  }
  return true;
}

// The last two products, of which SwiGLU takes both outputs.
bool CudaCommands::takes_rows_swiglu(View gate, View up, int64_t count) {
  auto* product = std::get_if<RowsProduct>(&waiting_);
  if (auto* forward = std::get_if<RowsForward>(&waiting_); forward && !forward->down) product = &forward->products;
  if (!product || product->count < 2 || product->params.gated != no_output || product->params.residual) return false;
  RowsParams& params = product->params;
  const size_t last = product->count - 1;
  if (params.out[last - 1] != address<float>(gate) || params.out[last] != address<float>(up) ||
      params.rows[last - 1] != params.rows[last] || params.out_stride[last - 1] != params.rows[last] ||
      params.out_stride[last] != params.rows[last] || count != int64_t{params.n} * params.rows[last])
    return false;
  params.gated = static_cast<uint32_t>(last - 1);
  return true;
}

void CudaCommands::launch_rows_forward(const RowsForward& forward) {
  launch_rows(forward.products);
  launch_choice(forward.products.params.n, forward.route);
  if (forward.down) launch_rows(*forward.down);
}

// The choice that waits, of the experts of these rows: what comes before it is launched.
std::optional<CudaCommands::RowsForward> CudaCommands::take_rows_choice(const ChosenExpertArgs& args, int64_t n) {
  const auto* waiting = std::get_if<RowsForward>(&waiting_);
  if (!waiting || waiting->route.ids != address<const int>(args.ids) || waiting->route.k != args.k ||
      args.k > int64_t{lanes} || waiting->products.params.n != n)
    return std::nullopt;
  const RowsForward forward = *waiting;
  waiting_ = std::monostate();
  launch_rows(forward.products);
  return forward;
}

}  // namespace moeflux::cuda
