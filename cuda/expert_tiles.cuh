// Experts that few rows of x chose: gate and up, or down, of one or two rows at a time. As the kernels that have one
// pair each, bit for bit.
#include "sorted_pairs.h"
#include "tiles_params.h"
#include "two_rows.h"

// One or two rows of x that go through the tiles of an expert.
struct EntryRows {
  const float* x;
  u32 rows[two_rows];  // pairs, or those of x behind the chosen experts. The second is the first if there is none
  u32 count;
  u32 of_row;  // pairs that share a row of x
};
template <bool is_double>
DEV EntryRows rows_of_entry(const ExpertTilesParams& all, const SortedPairs& sorted, u32 entries, u32 entry) {
  if (is_double || entry < entries) {
    const u32 count = sorted.entries[entry].count;
    return {all.experts.x, {sorted.pairs[entry][0], sorted.pairs[entry][count - 1]}, count, all.experts.k};
  }
  const u32 first = (entry - entries) * two_rows, count = min(two_rows, all.shared_rows - first);
  return {all.shared_x, {first, first + count - 1}, count, 1};
}

// An entry's tile, and how one comes to those behind it.
struct TileAt {
  u32 index;  // among the tiles of all entries
  u32 entry;
  u32 tile;

  DEV TileAt(u32 i, u32 of_entry) : index(i), entry(i / of_entry), tile(i % of_entry) {}
  // Returns whether that is in the same entry.
  DEV bool go_on(u32 by, u32 of_entry) {
    index += by, tile += by;
    const bool is_same = tile < of_entry;
    while (tile >= of_entry) tile -= of_entry, entry++;
    return is_same;
  }
};

// The tiles of all entries lie one after the other, those of the shared expert with two rows at a time behind them. A
// block has its share, of which its warps take tiles in turn. `room`: digits of entries, then a stream of each warp.
template <u32 bits, bool is_double, bool is_bf16>
DEV void stream_tiles(const ExpertTilesParams& all, u8* room, const SortedPairs& sorted, u32 entries,
                      bool waits_later) {
  typedef TileStream<bits, is_double> Stream;
  const ExpertParams& params = all.experts;
  constexpr u32 outputs = Stream::of_each, span = lanes * pack;
  const u32 warp = warp_of(), lane = lane_of(), warps = blockDim.x / lanes, g = lane / 4, t = lane % 4;
  const u32 parts = params.columns / part_columns, spans = (params.columns + span - 1) / span;
  const u32 entry_bytes = parts * entry_part_bytes, entry_room = all.entry_room;
  const u32 of_entry = params.rows / outputs;  // rows of one matrix are columns of another, so there are whole parts
  const u32 total = (entries + (is_double ? 0 : (all.shared_rows + two_rows - 1) / two_rows)) * of_entry;
  const u32 begin = total * blockIdx.x / gridDim.x, end = total * (blockIdx.x + 1) / gridDim.x;
  Stream stream(room + entry_room * entry_bytes + warp * stream_bytes, params.columns, warps);
  TileAt asked(begin + warp, of_entry);
  const auto ask = [&] {
    stream.ask(asked.index < end, [&] {
      const u32 first = asked.tile * outputs, entry = asked.entry;
      if (!is_double && entry >= entries) return StreamedTile{all.shared, {}, first};
      const u8* slot = sorted.entries[entry].slot;
      return StreamedTile{matrix_of(slot, params.matrix), is_double ? matrix_of(slot, params.second) : StoredMatrix{},
                          first};
    });
    if (asked.index < end && stream.stage == 0) stream.follows = asked.go_on(warps, of_entry);
  };
  // A task of a warp is a span of 256 columns of a row of x: of all entries from `base` on that have room, the first
  // rows come before the second ones, which most have not.
  const u32 first_entry = begin / of_entry, last_entry = (end + of_entry - 1) / of_entry;  // behind the last
  const auto some_of = [&](u32 base) { return min(entry_room, last_entry - base); };
  const auto tasks_of = [&](u32 base) { return some_of(base) * two_rows * spans; };
  const auto load = [&](u32 base, u32 task, float (&numbers)[pack]) {
    const u32 some = some_of(base), row = task / (spans * some);
    const EntryRows from = rows_of_entry<is_double>(all, sorted, entries, base + task / spans % some);
    if (row >= from.count) return false;
    pack_of_x(from.x + u64((row ? from.rows[1] : from.rows[0]) / from.of_row) * params.columns,
              task % spans * span + lane * pack, params.columns, numbers);
    return true;
  };
  const auto keep = [&](u32 base, u32 task, const float (&numbers)[pack]) {
    const u32 some = some_of(base);
    TwoRowsOfX(room + task / spans % some * entry_bytes, parts)
        .keep<bits>(task / (spans * some), task % spans * span, params.columns, numbers);
  };
  // The first rows of x are loaded before tiles are asked for, or they would come behind these. Those of down are not
  // there yet.
  float early[pack];
  const bool has_early = is_double && warp < tasks_of(first_entry) && load(first_entry, warp, early);
#pragma unroll 1
  for (u32 i = 0; i + 1 < stream_stages; i++) ask();
  if (waits_later) wait_for_previous();
  const LaneOfStage<bits> own;
  TileAt at(begin + warp, of_entry);
#pragma unroll 1
  for (u32 base = first_entry; base < last_entry; base += entry_room) {  // mostly once
    u32 task = warp;
    if (base != first_entry) {
      __syncthreads();
    } else if (is_double) {
      if (has_early) keep(base, task, early);
      task += warps;
    }
#pragma unroll 1
    for (; task < tasks_of(base); task += warps) {
      float numbers[pack];
      if (load(base, task, numbers)) keep(base, task, numbers);
    }
    __syncthreads();
    const u32 until = min(end, (base + entry_room) * of_entry);
#pragma unroll 1
    while (at.index < until) {
      const EntryRows here = rows_of_entry<is_double>(all, sorted, entries, at.entry);
      const LaneOfX first(TwoRowsOfX(room + (at.entry - base) * entry_bytes, parts), here.count);
      const bool is_chosen = is_double || at.entry < entries;
      const u32 expert = is_chosen ? sorted.entries[at.entry].expert : 0;
      const bool has_output = t / 2 < here.count && !(is_double && t % 2);
      float* out = (is_chosen ? params.out : all.shared_out) + u64(t < 2 ? here.rows[0] : here.rows[1]) * params.rows;
      bool is_same;
#pragma unroll 1
      do {
        LaneOfX x = first;
        float sum = 0.0f;
#pragma unroll 1
        for (u32 stage = 0; stage < stream.stages; stage++) {
          stream.await();
          ask();
          const u8* stored;
          const u8* codes = stream.take(stage, stored);
          u32 scales[Stream::stage_parts], biases[Stream::stage_parts];
          stream.scales_at(stored + own.scales, scales);
          stream.scales_at(stored + own.scales + stage_scale_bytes / 2, biases);
          const auto add = [&](u32 p) {
            sum += part_of_two<bits, is_bf16>(codes, p, own, scales[p], biases[p], x);
            x.go_on();
          };
          const bool is_half = parts % Stream::stage_parts != 0 && stage + 1 == stream.stages;
          if (is_half) {
            add(0);
          } else {  // nothing comes between parts, so that they are multiplied side by side
#pragma unroll
            for (u32 p = 0; p < Stream::stage_parts; p++) add(p);
          }
        }
        const u32 output = at.tile * outputs + g + (is_double ? 0 : t % 2 * 8);
        if (is_double) {
          const float up = __shfl_xor_sync(everyone, sum, 1);
          sum = both_of(params, expert, output, sum, up);
        } else if (is_chosen) {
          sum = biased(params, params.bias, expert, output, sum);
        }
        if (has_output) out[output] = sum;
        is_same = at.go_on(warps, of_entry);
      } while (is_same && at.index < until);
    }
  }
}

// Grid of blocks: as many as run at the same time. Dynamic memory: as above, and the pairs are sorted there first.
template <u32 bits, bool is_double>
DEV void expert_tiles(const ExpertTilesParams& all) {
  extern __shared__ uint4 room[];
  __shared__ SortedPairs sorted;
  PairCounts& counts = *reinterpret_cast<PairCounts*>(room);
  prepare_sort(all.experts, all.expert_count, counts);
  // Down comes when gate and up have waited, and so has the choice.
  const bool waits_later = !is_double && all.is_behind_gate_up;
  if (!waits_later) wait_for_previous();
  let_next_come();
  __syncthreads();
  const u32 entries = sort_pairs(all.experts, all.pairs, counts, sorted);
  if (all.experts.number == number_bf16)
    stream_tiles<bits, is_double, true>(all, reinterpret_cast<u8*>(room), sorted, entries, waits_later);
  else
    stream_tiles<bits, is_double, false>(all, reinterpret_cast<u8*>(room), sorted, entries, waits_later);
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

#define TILES_KERNELS(bits)                                                                        \
  KERNEL(expert_gate_up_tiles_##bits, ExpertTilesParams, (streaming_warps * lanes, copied_blocks), \
         (expert_tiles<bits, true>))                                                               \
  KERNEL(expert_down_tiles_##bits, ExpertTilesParams, (streaming_warps * lanes, copied_blocks),    \
         (expert_tiles<bits, false>))
TILES_KERNELS(4)
TILES_KERNELS(8)
