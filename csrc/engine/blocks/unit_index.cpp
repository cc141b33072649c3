#include "engine/blocks/unit_index.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace moeflux {

void UnitIndex::place(ScratchLayout& layout, int64_t row_numbers) {
  const int64_t n = layout.rows();
  const int64_t waiting = shape_.unit - 1;
  selection_.place(layout, row_numbers);
  layout.place_angles(room_.angles, rope_);
  layout.place_angles(room_.unit_angles, rope_, shape_.unit);
  layout.place(room_.queries, "index_queries", n * shape_.heads * shape_.dim);
  layout.place(room_.yields, "index_yields", n * shape_.dim);
  layout.place(room_.gathered, "index_gathered", (n + waiting) * shape_.dim);
  layout.place(room_.means, "index_means", n * shape_.dim);
  layout.place(room_.shares, "index_shares", n + waiting);
}

void UnitIndex::load(const LayerTensors& tensors) {
  const Matrix both = tensors.matrix("self_attn.indexer.index_qk_proj");
  q_ = both.slice(0, shape_.heads * shape_.dim);
  k_ = both.slice(shape_.heads * shape_.dim, shape_.dim);
  q_norm_ = tensors.vector("self_attn.indexer.q_layernorm.weight");
  k_norm_ = tensors.vector("self_attn.indexer.k_layernorm.weight");
}

float UnitIndex::scale() const { return static_cast<float>(1 / std::sqrt(static_cast<double>(shape_.dim))); }

void UnitIndex::record(Commands& commands, const Scratch& scratch, const Rows& rows) const {
  const int64_t n = rows.n;
  std::fill_n(room_.shares.values<float>(), n + shape_.unit - 1, 1 / static_cast<float>(shape_.unit));
  room_.shares.upload(commands, (n + shape_.unit - 1) * 4);
  commands.matmul(std::array{project(scratch.normed, q_, room_.queries), project(scratch.normed, k_, room_.yields)}, n);
  commands.rms_norm_heads(queries(shape_.dim), q_norm_, n, eps_, 1);
  commands.rope(queries(rope_.dim), room_.angles, rope_.dim / 2, false, n);
}

// Where the state after each row is wanted, what waits is kept row by row.
void UnitIndex::keep_keys(Commands& commands, const Piece& piece, const LayerState& state) const {
  over_rows(commands, piece, state[3],
            [&](int64_t row, int64_t count) { keep_rows(commands, piece, state, row - piece.first, count); });
}

void UnitIndex::keep_rows(Commands& commands, const Piece& piece, const LayerState& state, int64_t first,
                          int64_t n) const {
  const int64_t dim = shape_.dim;
  const int64_t position = piece.position + first;
  const int64_t waiting = position % shape_.unit;
  const int64_t units = (waiting + n) / shape_.unit;
  const int64_t left = (waiting + n) % shape_.unit;
  const View waits = state[3].fixed;
  if (waiting > 0) commands.copy(waits, room_.gathered, waiting * dim * 4);
  commands.copy(room_.yields.at((piece.first + first) * dim), room_.gathered.at(waiting * dim), n * dim * 4);
  if (left > 0) commands.copy(room_.gathered.at(units * shape_.unit * dim), waits, left * dim * 4);
  if (units == 0) return;
  commands.combine({{}, room_.gathered, room_.shares.device, dim, shape_.unit, {}, {}, room_.means}, units);
  commands.rms_norm_heads(dense_heads(room_.means, 1, dim), k_norm_, units, eps_, 1);
  const int64_t done = position / shape_.unit - piece.position / shape_.unit;  // units of the piece before these
  const View angles = room_.unit_angles.at((piece.first + done) * rope_.dim);
  commands.rope({room_.means, 1, rope_.dim, dim, dim}, angles, rope_.dim / 2, false, units);
  commands.append(room_.means, dim, state[2].rows, position / shape_.unit, units);
}

}  // namespace moeflux
