// Launches that come again and again, as CUDA graphs. A graph is made when the same kernels come in the same
// order for the second time. Afterwards, only arguments and grids that have changed are told to it. It gives the same
// bits as launches one by one. Copies stay outside: a node for one is bound to memory that may be gone when it is told
// of other memory.
//
// A short stretch is a graph only if most of its launches have the arguments that they had before: those of a layer,
// where each layer is a stretch, have a graph of their own.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <vector>

#include "cuda/work.h"

namespace moeflux::cuda {

class Graphs {
 public:
  explicit Graphs(std::shared_ptr<Device> device);
  ~Graphs();
  Graphs(const Graphs&) = delete;
  Graphs& operator=(const Graphs&) = delete;

  // Launches these items, none of which is anything else, as a graph. False if they are to be launched one by one.
  bool launch(std::span<const Item> items, const Work& work, const Stream& stream);
  int64_t launched() const { return launched_; }

 private:
  struct Graph;

  Graph* find(std::span<const Item> items, const Work& work);
  bool make(Graph& graph, std::span<const Item> items, const Work& work);
  bool update(Graph& graph, std::span<const Item> items, const Work& work);

  std::shared_ptr<Device> device_;
  std::list<std::unique_ptr<Graph>> graphs_;  // the last used first
  int64_t launched_ = 0;
};

}  // namespace moeflux::cuda
