// For tests: memory of a device that the host does not share, built on a backend whose memory it does share.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"

namespace moeflux {

// A buffer that stands in for `inner`. The kind of memory decides whether the host reaches it. If it does not, the
// buffer's addresses belong to pages that nobody may read or write. It keeps `kept`.
std::unique_ptr<Buffer> apart_buffer(std::unique_ptr<Buffer> inner, Memory memory, const std::string& what,
                                     std::shared_ptr<const void> kept);

// The same arguments with places of the inner backend. Places that are not of an apart buffer stay as they are.
// std::logic_error where no op may go: in staging, or past the end of a buffer.
View inside(View view);
Matrix inside(Matrix matrix);
Heads inside(Heads heads);
// In how many buffers they may lie.
constexpr int64_t apart_row_buffers = 3;
std::vector<View> inside(std::span<const View> blocks);
Product inside(Product product);
ExpertMatrices inside(ExpertMatrices expert);
AttentionArgs inside(AttentionArgs args);              // but for its blocks
LatentAttentionArgs inside(LatentAttentionArgs args);  // likewise
IndexScoresArgs inside(IndexScoresArgs args);          // likewise
IndexSelectArgs inside(IndexSelectArgs args);
GatherRowsArgs inside(GatherRowsArgs args);  // likewise
ConvArgs inside(ConvArgs args);
DeltaGatesArgs inside(DeltaGatesArgs args);
DeltaArgs inside(DeltaArgs args);
RouteArgs inside(RouteArgs args);
ExpertFlavour inside(ExpertFlavour flavour);
ExpertArgs inside(ExpertArgs args);  // the jobs stay as they are
ChosenExpertArgs inside(ChosenExpertArgs args);
CombineArgs inside(CombineArgs args);
HyperMixArgs inside(HyperMixArgs args);
HyperAddArgs inside(HyperAddArgs args);
NgramGateArgs inside(NgramGateArgs args);

// The same for a copy, which may use `bytes` at a place in any kind of memory.
View inside_any(View view, int64_t bytes);

}  // namespace moeflux
