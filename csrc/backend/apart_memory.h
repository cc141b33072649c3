// For tests: the memory of a device that the host does not share, over that of a backend that the host does.
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"

namespace moeflux {

// What the host gets in place of a buffer of `inner`. The kind of memory decides whether the host reaches it. If it
// does not, the buffer's addresses belong to pages that nobody may read or write.
std::unique_ptr<Buffer> apart_buffer(std::unique_ptr<Buffer> inner, Memory memory, const std::string& what);

// The places that ops are given, as places of the inner backend; others as they are. std::logic_error where an op has
// no business: in staging, or behind the end of a buffer.
View inside(View view);
Matrix inside(Matrix matrix);
Heads inside(Heads heads);
Cache inside(Cache cache);
Product inside(Product product);
ExpertMatrices inside(ExpertMatrices expert);
AttentionArgs inside(AttentionArgs args);
LatentAttentionArgs inside(LatentAttentionArgs args);
ConvArgs inside(ConvArgs args);
DeltaGatesArgs inside(DeltaGatesArgs args);
DeltaArgs inside(DeltaArgs args);
RouteArgs inside(RouteArgs args);
ExpertArgs inside(ExpertArgs args);  // but for its jobs
ChosenExpertArgs inside(ChosenExpertArgs args);
CombineArgs inside(CombineArgs args);

// `bytes` of a place in any memory: what a copy takes.
View inside_any(View view, int64_t bytes);

}  // namespace moeflux
