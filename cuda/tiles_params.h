// The argument of the experts of a few rows, by tiles in shared memory.
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
  uint32_t together;  // tiles of a place
  uint32_t places;
  uint32_t is_behind_gate_up;  // so that the choice was there before that kernel let this one come
};

}  // namespace moeflux::cuda
