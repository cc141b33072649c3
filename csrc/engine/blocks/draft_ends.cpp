#include "engine/blocks/draft_ends.h"

#include <array>

namespace moeflux {

void DraftEnds::place(ScratchLayout& layout) {
  layout.place(room_.before, "draft before", layout.rows() * stream_.width);
  layout.place(room_.tokens, "draft tokens", layout.rows() * stream_.width);
  layout.place(room_.unknown, "draft unknown", stream_.width);
}

void DraftEnds::load(const LayerTensors& tensors) {
  token_norm_ = tensors.vector("enorm.weight");
  hidden_norm_ = tensors.vector("hnorm.weight");
  out_norm_ = tensors.vector("shared_head.norm.weight");
  of_token_ = tensors.matrix("e_proj");
  of_hidden_ = tensors.matrix("h_proj");
}

void DraftEnds::begin(Commands& commands, const Scratch& s, const Matrix& embed, int64_t n) const {
  const int64_t width = stream_.width;
  commands.embed(embed, s.tokens, room_.tokens, n);
  commands.rms_norm(room_.tokens, token_norm_, room_.tokens, n, width, stream_.eps);
  commands.rms_norm(room_.before, hidden_norm_, room_.before, n, width, stream_.eps);
  commands.matmul(std::array{project(room_.tokens, of_token_, s.hidden), project(room_.before, of_hidden_, s.out)}, n);
  commands.residual_add(s.hidden, s.out, s.hidden, n * width);
}

void DraftEnds::end(Commands& commands, const Scratch& s, int64_t n) const {
  commands.rms_norm(s.hidden, out_norm_, s.normed, n, stream_.width, stream_.eps);
}

}  // namespace moeflux
