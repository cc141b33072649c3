// How a half of a layer reads the residual stream, and how what it yields comes to it: by a norm and a sum, or, where
// there are several streams side by side, by gates.
#pragma once

#include <string>

#include "engine/blocks/block.h"

namespace moeflux {

class Connection {
 public:
  explicit Connection(const Stream& stream) : stream_(stream) {}

  void place(ScratchLayout& layout);
  void want(WorkSizes& sizes, int64_t rows) const;
  // `norm` is the name of the norm of a single stream, `gated` that of the gates of several.
  void load(const LayerTensors& tensors, const std::string& norm, const std::string& gated);

  bool is_gated() const { return stream_.count > 1; }
  View norm() const { return norm_; }
  // scratch.normed = what the half reads.
  void read(Commands& commands, const Scratch& scratch, int64_t n) const;
  // scratch.hidden += y, which the half made of what `read` gave last.
  void add(Commands& commands, const Scratch& scratch, View y, int64_t n) const;

 private:
  struct Room {
    View normed;  // [n, streams, hidden]
    View low;     // [n, rank]
    View gates;   // [n, streams, hidden]
    View yields;  // [n, streams]
  };

  Stream stream_;
  View norm_;      // [hidden], or [streams, hidden]
  Matrix down_;    // [rank, streams * hidden]
  Matrix up_;      // [streams * hidden, rank]
  Matrix yields_;  // [streams, streams * hidden]; empty behind the last layer, where nothing comes to the streams
  Room room_;
};

}  // namespace moeflux
