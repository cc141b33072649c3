// Arguments of the experts of one row whose tiles have a slab of the columns, as params.h has those of all others.
#pragma once

#include "params.h"

namespace moeflux::cuda {

struct WideExpertParams {
  ExpertParams experts;
  uint32_t tile_parts;  // of the columns
  uint32_t places;      // for tiles
  uint32_t together;    // tiles whose sums are made together
  uint32_t nothing;
};

}  // namespace moeflux::cuda
