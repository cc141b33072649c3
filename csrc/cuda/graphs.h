// Launches that come again and again, as CUDA graphs. A graph is made when the same kernels come in the same
// order for the second time. Afterwards, only arguments and grids that have changed are told to it. It gives the same
// bits as launches one by one. Copies stay outside: a node for one is bound to memory that may be gone when it is told
// of other memory.
//
// A graph may be told the arguments of a stretch before this is launched, while another launch of it is under way,
// which keeps the arguments that it began with.
//
// A short stretch is a graph only if most of its launches have the arguments that they had before: those of a layer,
// where each layer is a stretch, have a graph of their own.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
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

  struct Graph;
  // A stretch whose graph knows its arguments, unless it was told others since, or has gone.
  struct Told {
    std::weak_ptr<Graph> graph;
    int64_t number;
  };

  // Tells a graph these items, all of which are launches. Nothing if they are to be launched one by one.
  std::optional<Told> tell(std::span<const Item> items, const Work& work);
  // False if the graph knows other arguments by now.
  bool launch(const Told& told, const Stream& stream);

 private:
  std::shared_ptr<Graph> find(std::span<const Item> items, const Work& work);
  bool make(Graph& graph, std::span<const Item> items, const Work& work);
  bool update(Graph& graph, std::span<const Item> items, const Work& work);

  std::shared_ptr<Device> device_;
  std::list<std::shared_ptr<Graph>> graphs_;  // the last used first
  int64_t told_ = 0;                          // how often any was told a stretch
};

}  // namespace moeflux::cuda
