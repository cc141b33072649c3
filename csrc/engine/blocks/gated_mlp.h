// down(silu(gate x) * up x), or with gelu: a dense layer's feed-forward part, and a shared expert.
#pragma once

#include <string>

#include "engine/blocks/block.h"

namespace moeflux {

class GatedMlp {
 public:
  explicit GatedMlp(int64_t intermediate, bool geglu = false) : intermediate_(intermediate), geglu_(geglu) {}

  void place(ScratchLayout& layout);
  void want(WorkSizes& sizes, int64_t rows) const;
  // Its tensors are `name`gate_proj and so on.
  void load(const LayerTensors& tensors, const std::string& name);
  void record(Commands& commands, View x, View out, int64_t n) const;
  // The same in two parts, between which nobody else may use its room.
  void record_inner(Commands& commands, View x, int64_t n) const;
  void record_down(Commands& commands, View out, int64_t n) const;

 private:
  int64_t intermediate_;
  bool geglu_;
  Matrix gate_;     // [intermediate, hidden]
  Matrix up_;       // [intermediate, hidden]
  Matrix down_;     // [hidden, intermediate]
  View gate_room_;  // [n, intermediate]
  View up_room_;    // [n, intermediate]
};

}  // namespace moeflux
