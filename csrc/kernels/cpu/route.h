// Choices: of the experts for a token, and of the best tokens of a vocabulary.
//
// Everywhere the best comes first and the lower id wins a tie. In a choice, NaN is worse than any number, so ids are
// always distinct and in range. The weights of a row with NaN come out as arithmetic makes them.
#pragma once

#include <cstdint>

namespace moeflux::cpu {

// Choices among groups keep the scores of one row on the stack: neither more experts nor more groups than this.
constexpr int64_t max_routed_experts = 4096;

struct RouteTask {
  const float* logits = nullptr;  // [rows, experts]
  int64_t rows = 0;
  int64_t experts = 0;
  int64_t k = 0;  // at most `experts`
  bool normalize = true;
  float scaling = 1;
  const float* bias = nullptr;     // [experts]; route_grouped only
  const float* factors = nullptr;  // [experts] or null: by which weights are multiplied at last; route_softmax only
  int64_t groups = 0;              // divides `experts`; route_softmax: 0 is none
  int64_t groups_kept = 0;
  int32_t* ids = nullptr;    // [rows, k]
  float* weights = nullptr;  // [rows, k]
};

// One of the best so far: what top_k leaves in its scratch.
struct Candidate {
  float value = 0;
  int32_t id = 0;
};

struct TopKTask {
  const float* logits = nullptr;
  int64_t count = 0;
  int64_t k = 0;                 // at most `count`
  int32_t* ids = nullptr;        // [k]
  float* values = nullptr;       // [k]
  Candidate* scratch = nullptr;  // RouteKernels::top_k_scratch candidates
};

struct RouteKernels {
  void (*route_softmax)(const RouteTask& task, int64_t row);
  void (*route_grouped)(const RouteTask& task, int64_t row);
  int64_t (*top_k_scratch)(const TopKTask& task);
  int64_t (*top_k_units)(const TopKTask& task);
  void (*top_k)(const TopKTask& task, int64_t unit);  // the best of a block of logits, into the scratch
  void (*top_k_merge)(const TopKTask& task);          // after every unit has run
};

}  // namespace moeflux::cpu
