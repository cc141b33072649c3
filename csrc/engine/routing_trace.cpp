#include "engine/routing_trace.h"

#include <array>

namespace moeflux {
namespace {

constexpr size_t default_blocks = 4096;  // 4 GiB; the list itself is not moved before that

}  // namespace

RoutingTrace::RoutingTrace(const Variant& variant)
    : experts_(variant.experts().count), experts_per_token_(variant.experts().per_token) {
  for (int64_t layer = 0; layer < variant.num_layers(); ++layer)
    if (variant.is_moe(layer)) layers_.push_back(variant.layers_before + layer);
  blocks_.reserve(default_blocks);
  blocks_.push_back(std::make_unique<uint16_t[]>(block_ids));
}

void RoutingTrace::add(int64_t layer, std::span<const int32_t> ids) {
  const std::lock_guard lock(mutex_);
  const auto tokens = static_cast<int32_t>(static_cast<int64_t>(ids.size()) / experts_per_token_);
  if (layer == layers_.front()) {
    size_ = complete_;  // drops what a failure left
    next_layer_ = 0;
    append(std::array{tokens & 0xffff, tokens >> 16});
  }
  append(ids);
  if (++next_layer_ < layers_.size()) return;
  complete_ = size_;
  tokens_ += tokens;
}

void RoutingTrace::append(std::span<const int32_t> values) {
  for (const int32_t value : values) {
    if (size_ == blocks_.size() * block_ids) blocks_.push_back(std::make_unique<uint16_t[]>(block_ids));
    blocks_[size_ / block_ids][size_ % block_ids] = static_cast<uint16_t>(value);
    ++size_;
  }
}

int64_t RoutingTrace::tokens() const {
  const std::lock_guard lock(mutex_);
  return tokens_;
}

RoutingTrace::Content RoutingTrace::content() const {
  const std::lock_guard lock(mutex_);
  Content content;
  content.tokens = tokens_;
  const auto k = static_cast<size_t>(experts_per_token_);
  const size_t row = layers_.size() * k;
  content.ids.resize(static_cast<size_t>(tokens_) * row);
  size_t first = 0;  // token
  for (size_t next = 0; next < complete_;) {
    const size_t tokens = at(next) | static_cast<size_t>(at(next + 1)) << 16;
    next += 2;
    for (size_t layer = 0; layer < layers_.size(); ++layer)
      for (size_t token = first; token < first + tokens; ++token)
        for (size_t i = 0; i < k; ++i) content.ids[token * row + layer * k + i] = at(next++);
    first += tokens;
    content.per_pass.push_back(static_cast<int64_t>(tokens));
  }
  return content;
}

}  // namespace moeflux
