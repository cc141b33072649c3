// The argument of the experts of a few rows, whose tiles warps go through.
#pragma once
#include "params.h"

namespace moeflux::cuda {

struct ExpertTilesParams {
  ExpertParams experts;   // with `ids`
  StoredMatrix shared;    // another expert with as many rows and columns, that all rows go through
  const float* shared_x;  // rows of x, one after the other
  float* shared_out;
  uint32_t shared_rows;  // of x, 0 if there is no such expert
  uint32_t pairs;
  uint32_t expert_count;
  uint32_t entry_room;         // entries whose digits a block has room for
  uint32_t is_behind_gate_up;  // so that the choice was there before that kernel let this one come
  uint32_t nothing;
};

}  // namespace moeflux::cuda
