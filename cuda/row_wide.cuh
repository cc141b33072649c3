// Matrices in groups of 64, times one row of f32 that is too long for the warps of a block, by tiles in shared memory.
// A block takes a slab of the columns through all of its tiles, then the next slab. So a tile here is sixteen rows of a
// slab. What outputs are so far is in shared memory, too.
#include "experts.h"
#include "row_tiles.h"
#include "wide.h"

// How a block goes through its tiles.
struct WidePlan {
  u32 columns;
  u32 tile_parts;  // of the columns; the last slab may have fewer
  u32 count;       // of tiles, in each slab
  u32 places;
  u32 together;  // tiles whose sums are made together

  DEV u32 all_parts() const { return columns / part_columns; }
  DEV u32 slabs() const { return (all_parts() + tile_parts - 1) / tile_parts; }
  DEV u32 parts_of(u32 slab) const { return min(tile_parts, all_parts() - slab * tile_parts); }
};

// What is asked for of a slab of a tile's rows: of each row its codes, and its scales and biases in copies of sixteen
// bytes, of which a row has a few. Rows behind the last are taken to be the last. By a warp, or by `warps` of them
// where nobody asks but loads.
DEV void bring_slab(const TilePlaces& tiles, u32 i, const TileRows& from, const TileShape& whole, u32 slab, u32 parts,
                    u32 bits, u32 warp, u32 warps) {
  const TileShape& shape = from.shape;
  const u32 lane = lane_of(), code_bytes = parts * (part_columns / 8) * bits, quads = parts / 4;
  const u32 of_each = from.second.codes ? tile_rows / 2 : tile_rows;
  u8* const place = tiles.place(i);
  const auto matrix_of_row = [&](u32 r) { return r < of_each ? from.matrix : from.second; };
  const auto row_of = [&](u32 r) { return u64(min(from.first + r % of_each, from.rows - 1)); };
  constexpr u32 most_quads = 8, rows_at_once = lanes / most_quads;
#if defined(MOEFLUX_COPIES)
  u64* arrival = tiles.arrivals + (i & tiles.mask);
  if (lane < tile_rows)
    copy_in_bulk(place + lane * shape.row_bytes,
                 matrix_of_row(lane).codes + row_of(lane) * whole.row_bytes + u64(slab) * shape.row_bytes, code_bytes,
                 arrival);
#else
  for (u32 r = warp; r < tile_rows; r += warps) {
    const u8* codes = matrix_of_row(r).codes + row_of(r) * whole.row_bytes + u64(slab) * shape.row_bytes;
    for (u32 at = lane * 16; at < code_bytes; at += lanes * 16) copy_16(place + r * shape.row_bytes + at, codes + at);
  }
#endif
#pragma unroll 1
  for (u32 base = warp * rows_at_once; base < 2 * tile_rows; base += warps * rows_at_once) {
    const u32 at = base + lane / most_quads, r = at % tile_rows, quad = lane % most_quads;
    const StoredMatrix matrix = matrix_of_row(r);
    if (quad < quads)
      copy_16(place + shape.scales() + at * shape.scale_bytes + quad * 16,
              (at < tile_rows ? matrix.scales : matrix.biases) + row_of(r) * whole.scale_bytes +
                  u64(slab) * shape.scale_bytes + quad * 16);
  }
#if defined(MOEFLUX_COPIES)
  arrive_with_copies(arrival);
  if (lane == 0) expect_bytes(arrival, tile_rows * code_bytes);
#endif
}

// Outputs of a block, as outputs_of_one has them, bit for bit. rows_of(t) are the rows of tile t, x_when_there() waits
// for x, pack_of(part, numbers) is the lane's pack of a part, and done(part, numbers) is what becomes of it before it
// is digits; met_of(t, r) is what an output meets, and out(t, r, total, up, met) takes it.
template <u32 bits, class RowsOf, class XWhenThere, class PackOf, class Done, class MetOf, class Out>
DEV void wide_outputs(const WidePlan& plan, u32 number, RowShared& shared, RowsOf rows_of, XWhenThere x_when_there,
                      PackOf pack_of, Done done, MetOf met_of, Out out) {
  extern __shared__ uint4 room[];
  const TileShape shape = tile_shape(plan.tile_parts * part_columns, bits), whole = tile_shape(plan.columns, bits);
  const TilePlaces tiles = tile_places(room, shape.bytes(), plan.places, shared.arrivals);
  const u32 warp = warp_of(), lane = lane_of(), warps = blockDim.x / lanes, slabs = plan.slabs();
  const u32 of_tile = made_once(plan.tile_parts * tile_rows);  // sums
  float* sums = reinterpret_cast<float*>(tiles.end());
  float* so_far = sums + 2 * plan.together * of_tile;
  if (threadIdx.x == 0) tiles.prepare();
  __syncthreads();
  const auto bring = [&](u32 begin, u32 end) {
    const u32 first = TilePlaces::one_asks ? warps - 1 - warp : 0, step = TilePlaces::one_asks ? warps : 1;
#pragma unroll 1
    for (u32 i = begin + first; i < end; i += step) {
      const u32 slab = i / plan.count;
      TileRows from = rows_of(i - slab * plan.count);
      from.shape = shape;
      bring_slab(tiles, i, from, whole, slab, plan.parts_of(slab), bits, TilePlaces::one_asks ? 0 : warp,
                 TilePlaces::one_asks ? 1 : warps);
    }
    if (!TilePlaces::one_asks) end_of_copies(), wait_for_copies<0>();
  };
  const auto part_of = [&](u32 slab) {
    return slab * plan.tile_parts + min(warp * copied_parts + lane / (lanes / 2), plan.parts_of(slab) - 1);
  };
  float numbers[pack];
  u32 asked = 0, half = 0;
#pragma unroll 1
  for (u32 slab = 0; slab < slabs; slab++) {
    const u32 parts = plan.parts_of(slab);
    const bool is_last = slab + 1 == slabs;
    const LaneOfTile<bits> own(shape, warp * copied_parts, parts);
    RowPart x[copied_parts];
#pragma unroll 1
    for (u32 base = 0; base < plan.count; base += plan.together, half ^= 1) {
      const u32 at = slab * plan.count + base, here = min(plan.together, plan.count - base);
      const u32 end = min(at + plan.places, plan.count * slabs);
      float* of_half = sums + half * plan.together * of_tile;
      bring(asked, end);
      asked = end;
      if (base == 0) {
        if (slab == 0) x_when_there(), pack_of(part_of(0), numbers);
        done(part_of(slab), numbers);
        make_parts(numbers, shared.stages[warp], x);
        if (!is_last) pack_of(part_of(slab + 1), numbers);
      }
      const u32 own_tile = base + threadIdx.x / tile_rows, r = threadIdx.x % tile_rows;
      const bool has_own = threadIdx.x < here * tile_rows;
      const auto met = met_of(own_tile, r, has_own && is_last);
      tiles.settle();
#pragma unroll 1
      for (u32 i = 0; i < here; i++) {
        tiles.await(at + i);
        parts_of_tile<bits>(tiles.place(at + i), own, number, x, of_half + i * of_tile);
      }
      __syncthreads();
      if (warp * lanes < here * tile_rows) {
        const u32 i = min(threadIdx.x / tile_rows, here - 1);
        float* kept = so_far + (base + i) * tile_rows + r;
        const float total = sum_of_parts(of_half + i * of_tile, parts, r, slab > 0 ? *kept : 0.0f);
        const float up = __shfl_sync(everyone, total, lane / tile_rows * tile_rows + r % 8 + 8);
        if (has_own && is_last) out(own_tile, r, total, up, met);
        if (has_own && !is_last) *kept = total;
      }
    }
  }
}

// As matmul_one, bit for bit. Dynamic memory: places for tiles, twice the parts of `together` tiles, the block's
// outputs. Weights are on their way before the kernel waits for the one before it; nobody writes them.
template <u32 bits>
DEV void row_wide(const OneRowParams& params) {
  __shared__ RowShared shared;
  let_next_come();
  const auto place = [&](u32 i) { return tile_place(params, blockIdx.x + i * gridDim.x); };
  const auto rows_of = [&](u32 i) { return rows_of_tile(params, place(i), {}); };  // slabs have a shape of their own
  float factor = 1.0f;
  const auto x_when_there = [&] {
    wait_for_previous();
    if (params.weight) factor = norm_factor(params.x, params.columns, params.eps, shared.squares);
  };
  const auto done = [&](u32 part, float (&numbers)[pack]) {
    if (params.weight == nullptr) return;
    float weights[pack];
    pack_of_part(params.weight, part, weights);
    norm_of_pack(params, part, factor, weights, numbers);
  };
  const u32 count = (params.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;
  wide_outputs<bits>(
      {params.columns, params.tile_parts, count, params.places, params.together}, params.number, shared, rows_of,
      x_when_there, [&](u32 part, float (&numbers)[pack]) { pack_of_part(params.x, part, numbers); }, done,
      [&](u32 i, u32 r, bool is_there) { return is_there ? load_met(params, place(i), r) : Met{}; },
      [&](u32 i, u32 r, float total, float up, const Met& met) { keep_output(params, place(i), r, total, up, met); });
}

// As expert_one, bit for bit. Grid of blocks: blocks that go through tiles of rows, blocks of one pair. Dynamic memory
// as above.
template <u32 bits, bool is_double>
DEV void expert_wide(const WideExpertParams& all) {
  __shared__ RowShared shared;
  begin_kernel();
  const ExpertParams& params = all.experts;
  constexpr u32 outputs = is_double ? tile_rows / 2 : tile_rows;
  const Pairs block = pairs_of(params);
  if (block.count == 0) return;
  const u32 pair = pair_at(params, block.first), tiles = (params.rows + outputs - 1) / outputs;
  const float* x = params.x + u64(pair / params.k) * params.columns;
  const StoredMatrix matrix = matrix_of(block.slot, params.matrix);
  const StoredMatrix second = is_double ? matrix_of(block.slot, params.second) : StoredMatrix{};
  const auto first = [&](u32 i) { return (blockIdx.x + i * gridDim.x) * outputs; };
  struct Nothing {};
  wide_outputs<bits>(
      {params.columns, all.tile_parts, (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x, all.places, all.together},
      params.number, shared, [&](u32 i) { return TileRows{{}, matrix, second, first(i), params.rows}; }, [] {},
      [&](u32 part, float (&numbers)[pack]) { pack_of_part(x, part, numbers); }, [](u32, float (&)[pack]) {},
      [](u32, u32, bool) { return Nothing{}; },
      [&](u32 i, u32 r, float total, float up, const Nothing&) {
        const u32 row = first(i) + r;
        if (r < outputs && row < params.rows)
          params.out[u64(pair) * params.rows + row] = is_double ? both_of(params, block.expert, row, total, up)
                                                                : biased(params, params.bias, block.expert, row, total);
      });
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

#define WIDE_KERNEL(name, Params, function) KERNEL(name, Params, (copied_warps * lanes), function)
#define WIDE_KERNELS(bits)                                                             \
  WIDE_KERNEL(row_wide_##bits, OneRowParams, row_wide<bits>)                           \
  WIDE_KERNEL(expert_gate_up_wide_##bits, WideExpertParams, (expert_wide<bits, true>)) \
  WIDE_KERNEL(expert_down_wide_##bits, WideExpertParams, (expert_wide<bits, false>))
WIDE_KERNELS(4)
WIDE_KERNELS(8)
