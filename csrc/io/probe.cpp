#include "io/probe.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "core/arena.h"

namespace moeflux {
namespace {

using Clock = std::chrono::steady_clock;

std::vector<int64_t> shuffled(int64_t count, uint64_t seed) {
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  std::ranges::shuffle(order, std::mt19937_64(seed));
  return order;
}

}  // namespace

ProbeSource pieces_of(Reader& reader, int64_t piece_bytes) {
  const auto add = [&reader, piece_bytes](int64_t piece, std::span<std::byte> into, ReadBatch& batch) {
    batch.add({&reader, piece * piece_bytes, into.first(static_cast<size_t>(piece_bytes))});
    return piece_bytes;
  };
  return {reader.bytes() / piece_bytes, piece_bytes, 0, add};
}

ProbeSource pieces_of(const ExpertStore& store) {
  std::vector<int64_t> layers;
  for (int64_t layer = 0; layer < store.layers(); ++layer)
    if (store.has_experts(layer)) layers.push_back(layer);
  const int64_t experts = store.experts_per_layer();
  const auto pieces = static_cast<int64_t>(layers.size()) * experts;
  const auto add = [&store, layers = std::move(layers), experts](int64_t piece, std::span<std::byte> into,
                                                                 ReadBatch& batch) {
    return store.add_reads(layers[static_cast<size_t>(piece / experts)], piece % experts, into, batch);
  };
  return {pieces, store.slot().bytes, store.bounce(), add};
}

ProbeRate probe_reads(const ProbeSource& source, int readers, double seconds, uint64_t seed,
                      const std::function<void()>& interruption, int64_t rooms) {
  // There are two pieces for each thread, one being read and one waiting, so that every thread always has something to
  // do.
  const auto in_flight = static_cast<size_t>(2 * readers);
  const auto room = static_cast<size_t>(source.piece_bytes);
  const size_t count = std::max(in_flight, static_cast<size_t>(rooms));
  const Arena memory(static_cast<int64_t>(count * room), "reads to be measured");
  std::fill_n(memory.data(), count * room, std::byte{0});  // so that the first reads do not pay for the pages
  const std::vector<int64_t> order = shuffled(source.pieces, seed);
  size_t next = 0;

  ReadPool pool(readers, source.bounce);
  std::vector<ReadBatch> batches(in_flight);
  std::vector<int64_t> bytes(in_flight);
  const auto start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  const auto begin = [&](size_t place) {
    if (next == order.size() || (next > 0 && elapsed() >= seconds)) return;
    // Pieces are waited for in the order in which they began, so what landed here last has been read.
    const std::span<std::byte> into(memory.data() + next % count * room, room);
    bytes[place] = source.add(order[next++], into, batches[place]);
    pool.submit(batches[place]);
  };
  for (size_t place = 0; place < in_flight; ++place) begin(place);
  ProbeRate rate;
  for (size_t place = 0; batches[place].size() > 0; place = (place + 1) % in_flight) {
    static_cast<void>(batches[place].wait());
    ++rate.reads;
    rate.bytes += bytes[place];
    rate.seconds = elapsed();
    interruption();
    begin(place);
  }
  return rate;
}

}  // namespace moeflux
