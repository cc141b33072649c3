#include "cuda/graphs.h"

#include <algorithm>
#include <cstring>

namespace moeflux::cuda {
namespace {

constexpr size_t fewest_items = 6;    // shorter stretches gain nothing
constexpr size_t long_items = 24;     // so many make it worth while to tell a graph all arguments anew
constexpr size_t most_graphs = 1024;  // several of each layer of a large model, where each layer has its own

bool same_kernel(const Item& a, const Item& b) { return a.kernel == b.kernel; }

KernelNodeParams launch_of(const Item& item, void** params) {
  return {.function = item.kernel->function,
          .grid_x = item.grid.x,
          .grid_y = item.grid.y,
          .grid_z = item.grid.z,
          .block_x = item.threads,
          .block_y = 1,
          .block_z = 1,
          .shared_bytes = item.shared_bytes,
          .kernel_params = params,
          .extra = nullptr};
}

bool same_arguments(const Item& a, const Work& a_work, const Item& b, const Work& b_work) {
  return a.grid.x == b.grid.x && a.grid.y == b.grid.y && a.grid.z == b.grid.z && a.threads == b.threads &&
         a.shared_bytes == b.shared_bytes && a.params_bytes == b.params_bytes &&
         std::memcmp(a_work.params_of(a), b_work.params_of(b), a.params_bytes) == 0;
}

}  // namespace

struct Graphs::Graph {
  const DriverApi& api;
  std::vector<Item> items;  // as it was told them last
  Work work{};              // its params alone
  GraphHandle graph = nullptr;
  GraphExecHandle exec = nullptr;
  std::vector<GraphNodeHandle> nodes{};
  int64_t told = 0;  // by which number

  bool is_mostly(std::span<const Item> others, const Work& other_work) const {
    size_t changed = 0;
    for (size_t i = 0; i < items.size(); ++i)
      if (!same_arguments(items[i], work, others[i], other_work) && 2 * ++changed > items.size()) return false;
    return true;
  }

  void end() {
    if (exec) api.end_exec(exec);
    if (graph) api.end_graph(graph);
    exec = nullptr;
    graph = nullptr;
    nodes.clear();
    told = 0;
  }
};

Graphs::Graphs(std::shared_ptr<Device> device) : device_(std::move(device)) {}

Graphs::~Graphs() {
  const Current current(*device_);
  for (const std::shared_ptr<Graph>& graph : graphs_) graph->end();
}

// Of stretches that come in turn, the one that was used last comes last. So it looks from the back.
std::shared_ptr<Graphs::Graph> Graphs::find(std::span<const Item> items, const Work& work) {
  for (auto graph = graphs_.end(); graph != graphs_.begin();) {
    --graph;
    if (!std::ranges::equal((*graph)->items, items, same_kernel)) continue;
    if (items.size() < long_items && !(*graph)->is_mostly(items, work)) continue;
    graphs_.splice(graphs_.begin(), graphs_, graph);
    return *graph;
  }
  return nullptr;
}

std::optional<Graphs::Told> Graphs::tell(std::span<const Item> items, const Work& work) {
  if (items.size() < fewest_items) return std::nullopt;
  const std::shared_ptr<Graph> graph = find(items, work);
  if (!graph) {  // perhaps it never comes again
    if (graphs_.size() == most_graphs) {
      graphs_.back()->end();
      graphs_.pop_back();
    }
    graphs_.push_front(
        std::make_shared<Graph>(Graph{.api = device_->api(), .items = {items.begin(), items.end()}, .work = {}}));
    graphs_.front()->work.params = work.params;
    return std::nullopt;
  }
  graph->told = 0;
  if (!(graph->exec ? update(*graph, items, work) : make(*graph, items, work))) {
    graph->end();
    return std::nullopt;
  }
  try {
    graph->items.assign(items.begin(), items.end());
    graph->work.params = work.params;
  } catch (...) {  // it has arguments that nobody knows
    graph->end();
    throw;
  }
  graph->told = ++told_;
  return Told{graph, graph->told};
}

bool Graphs::launch(const Told& told, const Stream& stream) {
  const std::shared_ptr<Graph> graph = told.graph.lock();
  if (!graph || graph->told != told.number) return false;
  check(device_->api().launch_graph(graph->exec, stream.handle()), "cuda: cuGraphLaunch");
  return true;
}

// A chain. Where chip and driver can, a kernel comes while the one before it still runs.
bool Graphs::make(Graph& graph, std::span<const Item> items, const Work& work) {
  const DriverApi& api = device_->api();
  if (api.make_graph(&graph.graph, 0) != success) return false;
  const bool is_programmatic = api.add_edges && device_->chip().has(9);
  for (const Item& item : items) {
    GraphNodeHandle node = nullptr;
    const GraphNodeHandle* before = is_programmatic || graph.nodes.empty() ? nullptr : &graph.nodes.back();
    void* argument = const_cast<std::byte*>(work.params_of(item));
    const KernelNodeParams params = launch_of(item, &argument);
    if (api.add_kernel(&node, graph.graph, before, before ? 1 : 0, &params) != success) return false;
    graph.nodes.push_back(node);
  }
  if (is_programmatic) {
    const std::vector<GraphEdge> edges(items.size() - 1, programmatic_edge);
    const GraphNodeHandle* nodes = graph.nodes.data();
    if (api.add_edges(graph.graph, nodes, nodes + 1, edges.data(), edges.size()) != success) return false;
  }
  return api.make_exec(&graph.exec, graph.graph, 0) == success;
}

bool Graphs::update(Graph& graph, std::span<const Item> items, const Work& work) {
  const DriverApi& api = device_->api();
  for (size_t i = 0; i < items.size(); ++i) {
    const Item& item = items[i];
    if (same_arguments(graph.items[i], graph.work, item, work)) continue;
    void* argument = const_cast<std::byte*>(work.params_of(item));
    const KernelNodeParams params = launch_of(item, &argument);
    if (api.set_kernel(graph.exec, graph.nodes[i], &params) != success) return false;
  }
  return true;
}

}  // namespace moeflux::cuda
