// Products of one row by tiles in shared memory, and what a layer's feed-forward part becomes of them: the router's
// products with gate and up of the shared expert, the choice with gate and up of the experts, down of all with the sum.
#include <algorithm>
#include <bit>
#include <utility>

#include "cuda/stored_matrices.h"
#include "gpu/products.h"

namespace moeflux::cuda {
namespace {

constexpr uint32_t own_bytes = 21 << 10;  // that blocks have besides tiles and sums

bool meet(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
  const auto* first = static_cast<const std::byte*>(a);
  const auto* second = static_cast<const std::byte*>(b);
  return first < second + b_bytes && second < first + a_bytes;
}

}  // namespace

// ---- Products -------------------------------------------------------------------------------------------------------

// Two blocks on each multiprocessor, if there are so many tiles and enough of them have room: one multiplies while the
// other waits. Where a block's tiles do not all fit, it brings as many as do when it has multiplied those before.
// Nothing if there is no room, or a block's warps cannot have all parts of the columns.
std::optional<CudaCommands::CopiedRoom> CudaCommands::copied_room(uint32_t columns, uint32_t bits,
                                                                  uint32_t tiles) const {
  constexpr uint32_t enough = 4;  // tiles of a block
  const uint32_t all_parts = columns / part_columns, warps = divide_up(all_parts, copied_parts);
  if (warps > copied_warps) return std::nullopt;
  const Chip& chip = launches_.chip();
  const uint32_t tile =
      tile_bytes(columns, bits) + 2 * all_parts * tile_rows * uint32_t{sizeof(float)};  // with its sums
  for (uint32_t blocks = tiles > chip.multiprocessors ? 2 : 1; blocks > 0; --blocks) {
    const uint32_t of_block = divide_up(tiles, chip.multiprocessors * blocks);
    const uint32_t bytes = chip.shared_bytes_beside(blocks);
    const uint32_t fit = bytes < own_bytes + tile ? 0 : std::min((bytes - own_bytes) / tile, copied_places);
    if (fit < (blocks > 1 ? std::min(of_block, enough) : 1)) continue;
    const uint32_t places = fit >= of_block ? of_block : std::bit_floor(fit);  // as the kernel has it
    return CopiedRoom{.of_block = of_block,
                      .places = places,
                      .together = std::min(places, 2 * warps),  // each of their rows needs a thread
                      .threads = lanes * warps,
                      .bytes = places * tile};
  }
  return std::nullopt;
}

// Where a tile has a slab of the columns; so many pairs of a row and a matrix have such tiles. One block is on each
// multiprocessor: half of its tiles come while it multiplies the others. Nothing if there is no room, or scales of a
// row do not begin at sixteen bytes.
std::optional<CudaCommands::CopiedRoom> CudaCommands::wide_room(uint32_t columns, uint32_t bits, uint32_t tiles,
                                                                uint32_t pairs) const {
  constexpr uint32_t parts_of_word = 4;  // of sixteen bytes of scales
  const uint32_t all_parts = columns / part_columns;
  if (all_parts % parts_of_word != 0) return std::nullopt;
  const Chip& chip = launches_.chip();
  const uint32_t per_slab = divide_up(all_parts, divide_up(all_parts, copied_warps * copied_parts));
  const uint32_t tile_parts = divide_up(per_slab, parts_of_word) * parts_of_word;
  const uint32_t of_block = std::min(tiles, divide_up(int64_t{tiles} * pairs, chip.multiprocessors));
  const uint32_t all = of_block * divide_up(all_parts, tile_parts);
  const uint32_t tile = tile_bytes(tile_parts * part_columns, bits);
  const uint32_t sums = tile_parts * tile_rows * uint32_t{sizeof(float)};
  const uint32_t have = chip.shared_bytes_beside(1);
  for (uint32_t places = all <= copied_places ? all : copied_places; places > 0; places = std::bit_floor(places - 1)) {
    const uint32_t together = std::max(1u, places / 2);
    const uint32_t bytes = places * tile + 2 * together * sums + of_block * tile_rows * uint32_t{sizeof(float)};
    if (bytes + own_bytes <= have)
      return CopiedRoom{.of_block = of_block,
                        .places = places,
                        .together = together,
                        .threads = lanes * divide_up(tile_parts, copied_parts),
                        .bytes = bytes,
                        .tile_parts = tile_parts};
  }
  return std::nullopt;
}

bool CudaCommands::launch_copied(const RowProduct& product, OneRowParams& params) {
  const std::span bits = std::span(params.bits).first(product.count);
  const auto [least, most] = std::ranges::minmax(bits);
  std::optional<CopiedRoom> room = copied_room(params.columns, most, params.tiles);
  if (!room && least == most && !params.z) room = wide_room(params.columns, most, params.tiles, 1);
  if (!room) return false;
  params.places = room->places;
  params.together = room->together;
  params.tile_parts = room->tile_parts;
  const char* kind = room->tile_parts ? "row_wide_" : params.z ? "row_heads_" : "row_";
  launch(concat(kind, least == most ? concat(most) : "4_and_8"), {divide_up(params.tiles, room->of_block)},
         room->threads, params, room->bytes);
  return true;
}

// ---- The feed-forward part ------------------------------------------------------------------------------------------

CudaCommands::RowProduct* CudaCommands::waiting_products() {
  if (auto* products = std::get_if<RowProduct>(&waiting_)) return products;
  auto* forward = std::get_if<FeedForward>(&waiting_);
  return forward && !forward->down ? &forward->products : nullptr;
}

// The choice of experts by one of the outputs of products that wait.
bool CudaCommands::takes_route(const RouteParams& route) {
  auto* products = std::get_if<RowProduct>(&waiting_);
  if (!products || !products->is_copied) return false;
  const OneRowParams& params = products->params;
  if (params.gated != no_output || params.residual || params.taps ||
      std::ranges::find(params.out, route.logits) == std::end(params.out) ||
      !copied_room(params.columns, 8, params.tiles))
    return false;
  waiting_ = FeedForward{std::move(*products), route};
  return true;
}

// Gate and up of the shared expert, which go before the choice, or its down, which goes behind it.
bool CudaCommands::takes_shared(const RowProduct& next) {
  auto* forward = std::get_if<FeedForward>(&waiting_);
  if (!forward || forward->down || !next.is_copied) return false;
  RowProduct& products = forward->products;
  OneRowParams& params = products.params;
  if (params.gated != no_output) {
    if (next.count != 1 || next.params.x != params.out[params.gated]) return false;
    forward->down = next;
    return true;
  }
  const float* x = params.normed ? params.normed : params.x;
  if (next.count != 2 || products.count + 2 > most_outputs || next.params.x != x ||
      next.params.columns != params.columns || next.params.number != params.number)
    return false;
  const RouteParams& route = forward->route;
  for (size_t i = 0; i < next.count; ++i) {
    const int64_t bytes = int64_t{next.params.rows[i]} * 4;
    if (meet(next.params.out[i], bytes, route.logits, int64_t{route.experts} * 4) ||
        meet(next.params.out[i], bytes, route.ids, int64_t{route.k} * 4) ||
        meet(next.params.out[i], bytes, route.weights, int64_t{route.k} * 4))
      return false;
  }
  for (size_t i = 0; i < next.count; ++i, ++products.count) {
    params.matrices[products.count] = next.params.matrices[i];
    params.out[products.count] = next.params.out[i];
    params.rows[products.count] = next.params.rows[i];
    params.bits[products.count] = next.params.bits[i];
  }
  return true;
}

// Down of the shared expert, if it waits and may go behind the choice and the products of the experts.
std::optional<CudaCommands::RowProduct> CudaCommands::waiting_down(const RoutedParams& routed, int64_t made) const {
  const auto* product = std::get_if<RowProduct>(&waiting_);
  if (!product || product->count != 1 || !product->is_copied) return std::nullopt;
  const OneRowParams& params = product->params;
  if (params.weight || params.z || params.taps || params.residual || params.gated != no_output) return std::nullopt;
  const auto is_apart = [&](const float* x, int64_t bytes) {
    const RouteParams& route = routed.route;
    return !meet(x, bytes, route.ids, int64_t{route.k} * 4) && !meet(x, bytes, route.weights, int64_t{route.k} * 4) &&
           !meet(x, bytes, route.logits, int64_t{route.experts} * 4) && !meet(x, bytes, routed.experts.out, made) &&
           !meet(x, bytes, routed.experts.x, int64_t{routed.experts.columns} * 4);
  };
  if (!is_apart(params.x, int64_t{params.columns} * 4) || !is_apart(params.out[0], int64_t{params.rows[0]} * 4))
    return std::nullopt;
  return *product;
}

// The choice of experts for one row and the products of their gate and up are one launch, and down waits. The choice is
// one that waits, or one that was made before and is made again.
bool CudaCommands::takes_choice(const ChosenExpertArgs& args, const Lists& lists) {
  auto* forward = std::get_if<FeedForward>(&waiting_);
  const ExpertMatrices& e = args.first;
  if (!forward && (!args.choice || !is_few(*args.choice))) return false;
  const RouteParams route = forward ? forward->route : route_params(*args.choice);
  if (route.ids != lists.ids || route.k != args.k || args.k > int64_t{lanes} || !lists.are_aligned ||
      e.gate.format != e.up.format)
    return false;
  for (const Matrix* matrix : {&e.gate, &e.up, &e.down})
    if (!may_be_copied(*matrix, 0)) return false;
  const ExpertFlavour& f = args.flavour;
  const Second up = {&e.up, f.up_bias, f.alpha, f.limit, f.geglu};
  RoutedParams params = {.route = route,
                         .experts = expert_params(lists, 0, e.gate, up, f.gate_bias, args.k, args.x, args.scratch),
                         .down_bytes = 0,
                         .down = 0,
                         .places = 0,
                         .together = 0};
  const auto bits = static_cast<uint32_t>(e.gate.format.bits);
  const uint32_t tiles = divide_up(e.gate.rows, tile_rows / 2);
  const auto k = static_cast<uint32_t>(args.k);
  const std::optional<CopiedRoom> room = copied_room(params.experts.columns, bits, tiles * k);
  const int64_t made = args.k * e.gate.rows * 4;
  if (!room || !is_aligned(params.experts.x) || meet(params.experts.out, made, params.experts.x, e.gate.columns * 4) ||
      meet(params.experts.out, made, params.route.logits, int64_t{params.route.experts} * 4))
    return false;
  params.places = room->places;
  params.together = room->together;
  const int64_t first = e.down.weight.offset;
  const int64_t last = e.down.biases.offset + e.down.rows * e.down.columns / e.down.format.group_size * 2;
  if (first < e.down.scales.offset && e.down.scales.offset < e.down.biases.offset) {
    params.down = static_cast<uint64_t>(first);
    params.down_bytes = static_cast<uint64_t>(last - first);
  }
  const std::optional<RowProduct> shared = forward ? std::move(forward->down) : waiting_down(params, made);
  if (forward) {
    const RowProduct products = std::move(forward->products);
    waiting_ = std::monostate();
    launch_row(products);
  } else if (shared) {
    waiting_ = std::monostate();
  }
  launch(concat("routed_gate_up_", bits), {divide_up(tiles, room->of_block), k}, room->threads + lanes, params,
         room->bytes);
  waiting_ = ExpertOutputs{lists, e.down, f.down_bias, args.scratch, args.out, route.weights, route.experts, shared};
  return true;
}

void CudaCommands::launch_outputs(const ExpertOutputs& outputs) {
  if (outputs.shared) launch_row(*outputs.shared);
  product_of_experts("expert_down", outputs.lists, 0, outputs.matrix, {}, outputs.bias, 1, outputs.x, outputs.out);
}

// The sum of the outputs that wait.
bool CudaCommands::takes_sum(const CombineParams& sum) {
  auto* outputs = std::get_if<ExpertOutputs>(&waiting_);
  if (!outputs) return false;
  const Matrix& down = outputs->matrix;
  const std::optional<RowProduct>& shared = outputs->shared;
  const auto bits = static_cast<uint32_t>(down.format.bits);
  ExpertSumParams params = {
      .experts = expert_params(outputs->lists, 0, down, {}, outputs->bias, 1, outputs->x, outputs->out),
      .shared = {},
      .shared_x = nullptr,
      .shared_out = nullptr,
      .sum = sum,
      .slot_count = outputs->experts,
      .nothing = 0};
  params.experts.k = sum.k;
  if (sum.outputs != params.experts.out || sum.weights != outputs->weights || sum.hidden != params.experts.rows ||
      sum.k != outputs->lists.count || !is_aligned(params.experts.x))
    return false;
  if (shared) {
    const OneRowParams& own = shared->params;
    if (own.out[0] != sum.shared || own.rows[0] != sum.hidden || own.columns != params.experts.columns ||
        own.bits[0] != bits || own.number != params.experts.number || !is_aligned(own.x))
      return false;
    params.shared = own.matrices[0];
    params.shared_x = own.x;
    params.shared_out = own.out[0];
  }
  const uint32_t all_parts = params.experts.columns / part_columns;
  const uint32_t experts = sum.k + (shared ? 1 : 0);
  const uint32_t bytes =
      experts * (tile_bytes(params.experts.columns, bits) + (all_parts + 1) * tile_rows * uint32_t{sizeof(float)});
  const int64_t made = int64_t{sum.hidden} * 4;
  if (bytes + own_bytes > launches_.chip().shared_bytes ||
      meet(sum.out, made, params.experts.x, sum.k * params.experts.columns * 4) ||
      (shared && meet(sum.out, made, params.shared_x, params.experts.columns * 4)))
    return false;
  waiting_ = std::monostate();
  const uint32_t warps = std::min(sum_warps, experts * divide_up(all_parts, copied_parts));
  launch(concat("expert_sum_", bits), {divide_up(sum.hidden, tile_rows)}, lanes * warps, params, bytes);
  return true;
}

}  // namespace moeflux::cuda
