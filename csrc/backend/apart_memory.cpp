#include "backend/apart_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "core/error.h"

namespace moeflux {
namespace {

// Addresses without memory.
class NoAccess {
 public:
  NoAccess(int64_t bytes, const std::string& what) : bytes_(static_cast<size_t>(std::max<int64_t>(1, bytes))) {
    start_ = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start_ == MAP_FAILED)
      throw IoError(concat("addresses for ", what, ": the system refused ", bytes, ": ", std::strerror(errno)));
  }
  ~NoAccess() { munmap(start_, bytes_); }
  NoAccess(const NoAccess&) = delete;
  NoAccess& operator=(const NoAccess&) = delete;

  std::byte* start() const { return static_cast<std::byte*>(start_); }

 private:
  size_t bytes_;
  void* start_ = nullptr;
};

class ApartBuffer final : public Buffer {
 public:
  ApartBuffer(std::unique_ptr<Buffer> inner, Memory memory, std::unique_ptr<NoAccess> addresses,
              std::shared_ptr<const void> kept)
      : Buffer(addresses->start(), memory == Memory::device ? nullptr : inner->host(), inner->bytes(), memory),
        inner_(std::move(inner)),
        addresses_(std::move(addresses)),
        kept_(std::move(kept)) {}

  const Buffer& inner() const { return *inner_; }

 private:
  std::unique_ptr<Buffer> inner_;
  std::unique_ptr<NoAccess> addresses_;
  std::shared_ptr<const void> kept_;
};

}  // namespace

std::unique_ptr<Buffer> apart_buffer(std::unique_ptr<Buffer> inner, Memory memory, const std::string& what,
                                     std::shared_ptr<const void> kept) {
  auto addresses = std::make_unique<NoAccess>(inner->bytes(), what);
  return std::make_unique<ApartBuffer>(std::move(inner), memory, std::move(addresses), std::move(kept));
}

View inside_any(View view, int64_t bytes) {
  const auto* apart = dynamic_cast<const ApartBuffer*>(view.buffer);
  if (!apart) return view;
  if (view.offset < 0 || bytes < 0 || view.offset > apart->bytes() - bytes)
    throw std::logic_error(concat("[apart] expected ", bytes, " bytes at byte ", view.offset, " of a buffer, found ",
                                  apart->bytes(), " in it"));
  return {&apart->inner(), view.offset};
}

View inside(View view) {
  const View place = inside_any(view, 0);
  if (place.buffer != view.buffer && view.buffer->memory() == Memory::staging)
    throw std::logic_error("[apart] expected memory that ops reach, found staging");
  return place;
}

namespace {

// Each of them, in place.
template <typename... Places>
void move_inside(Places&... places) {
  ((places = inside(places)), ...);
}

}  // namespace

Matrix inside(Matrix matrix) {
  move_inside(matrix.weight, matrix.scales, matrix.biases);
  return matrix;
}

Heads inside(Heads heads) {
  move_inside(heads.view);
  return heads;
}

std::vector<View> inside(std::span<const View> blocks) {
  std::vector<View> places(blocks.begin(), blocks.end());
  std::vector<const Buffer*> buffers;
  for (View& place : places) {
    const View given = std::exchange(place, inside(place));
    const bool is_new = std::find(buffers.begin(), buffers.end(), place.buffer) == buffers.end();
    if (given.buffer != place.buffer && is_new) buffers.push_back(place.buffer);
  }
  if (std::ssize(buffers) > apart_row_buffers)
    throw std::logic_error(
        concat("[apart] expected rows in at most ", apart_row_buffers, " buffers, found ", buffers.size()));
  return places;
}

Product inside(Product product) {
  move_inside(product.x, product.matrix, product.out);
  return product;
}

ExpertMatrices inside(ExpertMatrices expert) {
  move_inside(expert.gate, expert.up, expert.down);
  return expert;
}

AttentionArgs inside(AttentionArgs args) {
  move_inside(args.q, args.sinks, args.out);
  return args;
}

LatentAttentionArgs inside(LatentAttentionArgs args) {
  move_inside(args.q_latent, args.q_pe, args.out);
  return args;
}

IndexScoresArgs inside(IndexScoresArgs args) {
  move_inside(args.q, args.weights, args.scores);
  return args;
}

IndexSelectArgs inside(IndexSelectArgs args) {
  move_inside(args.scores, args.ids);
  return args;
}

GatherRowsArgs inside(GatherRowsArgs args) {
  move_inside(args.ids);
  return args;
}

ConvArgs inside(ConvArgs args) {
  move_inside(args.x, args.state, args.weight, args.out);
  return args;
}

DeltaGatesArgs inside(DeltaGatesArgs args) {
  move_inside(args.alpha, args.b, args.a_log, args.dt_bias, args.decay, args.beta);
  return args;
}

DeltaArgs inside(DeltaArgs args) {
  move_inside(args.q, args.k, args.v, args.decay, args.beta, args.state, args.out);
  return args;
}

RouteArgs inside(RouteArgs args) {
  move_inside(args.logits, args.bias, args.factors, args.ids, args.weights);
  return args;
}

ExpertFlavour inside(ExpertFlavour flavour) {
  move_inside(flavour.gate_bias, flavour.up_bias, flavour.down_bias);
  return flavour;
}

ExpertArgs inside(ExpertArgs args) {
  move_inside(args.x, args.scratch, args.out, args.flavour);
  return args;
}

ChosenExpertArgs inside(ChosenExpertArgs args) {
  move_inside(args.x, args.ids, args.slots, args.first, args.scratch, args.out, args.flavour);
  if (args.choice) args.choice = inside(*args.choice);
  return args;
}

HyperMixArgs inside(HyperMixArgs args) {
  move_inside(args.normed, args.gates, args.out);
  return args;
}

HyperAddArgs inside(HyperAddArgs args) {
  move_inside(args.x, args.y, args.gates);
  return args;
}

NgramGateArgs inside(NgramGateArgs args) {
  move_inside(args.key, args.query, args.value, args.out);
  return args;
}

CombineArgs inside(CombineArgs args) {
  move_inside(args.residual, args.outputs, args.weights, args.shared, args.shared_gate, args.out);
  return args;
}

}  // namespace moeflux
