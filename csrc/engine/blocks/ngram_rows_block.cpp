#include "engine/blocks/ngram_rows_block.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "engine/blocks/recurrent_rows.h"

namespace moeflux {

void NgramRowsBlock::place(ScratchLayout& layout) {
  const int64_t n = layout.rows();
  const int64_t all = n * stream_.count * stream_.width;
  layout.place(rows_, concat("n-gram rows ", layer_), n * shape_.width);
  layout.place(room_.value, "n-gram value", n * stream_.width);
  layout.place(room_.first, "streams normed", all);
  layout.place(room_.second, "streams gates", all);
  layout.place(room_.third, "n-gram streams", all);
}

void NgramRowsBlock::want(WorkSizes& sizes, int64_t rows) const {
  sizes.inputs = std::max(sizes.inputs, rows * shape_.width);
}

void NgramRowsBlock::load(const LayerTensors& tensors) {
  weights_ = {
      .key = tensors.matrix("ple.key_proj"),
      .value = tensors.matrix("ple.value_proj"),
      .norm_key = tensors.vector("ple.norm_key.weight"),
      .norm_query = tensors.vector("ple.norm_query.weight"),
      .norm_conv = tensors.vector("ple.norm_conv.weight"),
      .conv = tensors.vector("ple.conv1d.weight"),
  };
}

void NgramRowsBlock::record(Commands& commands, const Scratch& scratch, size_t layer, const Rows& rows) const {
  const Weights& w = weights_;
  const Room& s = room_;
  const int64_t n = rows.n;
  const int64_t streams = stream_.count;
  const int64_t width = stream_.width;
  const int64_t channels = streams * width;
  rows_.upload(commands, n * shape_.width * 4);
  commands.matmul(std::array{project(rows_.device, w.key, s.first), project(rows_.device, w.value, s.value)}, n);
  commands.hyper_norm(s.first, w.norm_key, s.second, n, streams, width, stream_.eps);
  commands.hyper_norm(scratch.hidden, w.norm_query, s.first, n, streams, width, stream_.eps);
  commands.ngram_gate({s.second, s.first, s.value, streams, width, s.third}, n);
  commands.hyper_norm(s.third, w.norm_conv, s.first, n, streams, width, stream_.eps);
  for (const Piece& piece : rows.pieces) {
    const PlacedPiece& state = piece.state->layer(layer).back();
    over_rows(commands, piece, state, [&](int64_t row, int64_t count) {
      const int64_t from = row * channels;
      commands.conv1d({s.first.at(from), channels, shape_.taps, state.fixed, w.conv, s.second.at(from), shape_.length},
                      count);
    });
  }
  commands.residual_add(scratch.hidden, s.third, scratch.hidden, n * channels);
  commands.residual_add(scratch.hidden, s.second, scratch.hidden, n * channels);
}

}  // namespace moeflux
