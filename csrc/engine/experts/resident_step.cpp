#include "engine/experts/resident_step.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace moeflux {
namespace {

constexpr int64_t few_tokens = 64;

// Of several tokens, each batch has twice as many layers as the one before: the device begins after one, and while it
// computes some, the host records as many again and more.
bool ends_batch(int64_t layer) { return std::has_single_bit(static_cast<uint64_t>(layer + 2)); }

}  // namespace

ResidentStep::ResidentStep(ExpertSlots& slots, int64_t layers, bool fills)
    : slots_(slots), fills_(fills && slots.stay()), layers_(static_cast<size_t>(layers)) {}

bool ResidentStep::ready(int64_t layer) {
  if (!slots_.stay()) return false;
  const SlotCache& cache = slots_.cache();
  if (const int64_t evictions = cache.stats().evictions; evictions != evictions_) {  // a read had failed
    evictions_ = evictions;
    forget();
  }
  int64_t& found = layers_[static_cast<size_t>(layer)].found;
  auto* table = slots_.table(layer).values<uint64_t>();
  for (; found < cache.shape().experts; ++found) {
    const int64_t slot = cache.ready_slot(layer, found);
    if (slot < 0) return false;
    table[found] = static_cast<uint64_t>(slot * cache.shape().slot_bytes);
  }
  return true;
}

void ResidentStep::forget() { std::ranges::fill(layers_, Layer{}); }

void ResidentStep::run(const ExpertCall& call) {
  Commands& commands = call.commands();
  const Mirrored table = slots_.table(call.layer());
  if (!std::exchange(layers_[static_cast<size_t>(call.layer())].is_uploaded, true))
    table.upload(commands, slots_.cache().shape().experts * 8);
  call.block.record_route(commands, call.scratch, call.n, 0);
  call.block.record_shared(commands, call.scratch, call.n);
  call.block.record_chosen(commands, call.scratch, call.n, slots_.store().experts(call.layer()), table.device,
                           slots_.matrices(call.layer(), 0));
  call.block.record_sum(commands, call.scratch, call.n);
  const bool is_ahead = call.recorder.is_ahead();  // then the device has work
  if (!is_ahead && (call.n > few_tokens || (call.n > 1 && ends_batch(call.layer())))) call.recorder.send();
  call.stats.expert_hits += call.n * call.block.per_token();
  call.stats.beside_seconds += call.laps.lap();
}

bool ResidentStep::serves_all() {
  for (int64_t layer = 0; layer < slots_.store().layers(); ++layer)
    if (slots_.store().has_experts(layer) && !(ready(layer) && layers_[static_cast<size_t>(layer)].is_uploaded))
      return false;
  return true;
}

void ResidentStep::fill() {
  if (!fills_ || slots_.cache().stats().failures > 0) return;
  for (int64_t layer = 0; layer < slots_.store().layers(); ++layer)
    if (slots_.store().has_experts(layer) && !ready(layer) && !fill_layer(layer)) return;
}

// False when enough is under way.
bool ResidentStep::fill_layer(int64_t layer) {
  const int64_t experts = slots_.cache().shape().experts;
  for (int64_t expert = layers_[static_cast<size_t>(layer)].found; expert < experts; ++expert) {
    if (slots_.cache().contains(layer, expert)) continue;
    if (slots_.loader().counts().under_way >= experts || !slots_.loader().guess(layer, expert, 0, 1)) return false;
  }
  return true;
}

}  // namespace moeflux
