#include "engine/experts/expert_side.h"

#include <stdexcept>

#include "engine/experts/expert_matrices.h"
#include "io/read_pool.h"

namespace moeflux {

ExpertSide::ExpertSide(const StoreDirectory& store, Backend& backend, const EngineOptions& options,
                       const ReaderFactory& open)
    : store_(store, {ReadMode::buffered, open}),
      layers_(store.variant.num_layers()),
      experts_(store.variant.experts().count),
      memory_(backend.allocate(planned_slots(store, options), Memory::device, "experts")),
      groups_({experts_, options.chunk * store.variant.experts().per_token}) {
  jobs_.reserve(static_cast<size_t>(experts_));
  read_all(options.readers);
}

int64_t ExpertSide::planned_slots(const StoreDirectory& store, const EngineOptions&) {
  return store.variant.num_layers() * store.variant.experts().count * (slot_layout(store).bytes + 8);
}

View ExpertSide::place_of(int64_t layer, int64_t expert) const {
  return {memory_.get(), (layer * experts_ + expert) * store_.slot().bytes};
}

void ExpertSide::read_all(int64_t readers) {
  auto* places = View{memory_.get(), slots() * store_.slot().bytes}.host<uint64_t>();
  ReadPool pool(static_cast<int>(readers), store_.bounce());
  for (int64_t layer = 0; layer < layers_; ++layer) {
    if (!store_.has_experts(layer)) continue;
    for (int64_t expert = 0; expert < experts_; ++expert) {
      const View place = place_of(layer, expert);
      places[layer * experts_ + expert] = static_cast<uint64_t>(place.offset);
      ReadBatch batch;
      store_.add_reads(layer, expert, std::span(place.host(), static_cast<size_t>(store_.slot().bytes)), batch);
      pool.submit(batch, ReadPriority::demand);
      if (!batch.wait()) throw std::logic_error("nobody dropped a read");
    }
  }
}

void ExpertSide::run(Recorder& recorder, const RoutedExpertsBlock& block, const Scratch& scratch, int64_t n,
                     StepStats& stats) {
  Commands& commands = recorder.current();
  block.record_route(commands, scratch, n, 0);
  block.record_shared(commands, scratch, n);
  if (n == 1) {
    const View places = {memory_.get(), slots() * store_.slot().bytes + block.layer() * experts_ * 8};
    block.record_chosen(commands, scratch, store_.experts(), places, expert_matrices(store_, {memory_.get(), 0}));
    stats.expert_hits += block.per_token();
  } else {
    groups_.assign({block.router().ids().values<int32_t>(), static_cast<size_t>(n * block.per_token())});
    jobs_.clear();
    for (const ExpertGroups::Group& group : groups_.groups())
      jobs_.push_back(
          {expert_matrices(store_, place_of(block.layer(), group.expert)), group.pairs, group.count, group.expert});
    block.record_experts(commands, scratch, n, store_.experts(), jobs_);
    stats.expert_hits += static_cast<int64_t>(groups_.groups().size());
  }
  block.record_sum(commands, scratch, n);
}

}  // namespace moeflux
