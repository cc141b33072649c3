// Every kernel of one instruction set. Kernels work on raw memory and one thread; callers divide the work.
//
// What a kernel computes for one output element does not depend on how the work was divided, so results are bit-equal
// for any number of threads. Each family is declared in its header and defined in the .inl beside it, which every
// instruction set's translation unit compiles anew.
#pragma once

#include "kernels/cpu/attention.h"
#include "kernels/cpu/choice.h"
#include "kernels/cpu/delta.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/hyper.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/route.h"
#include "kernels/cpu/selection.h"

namespace moeflux::cpu {

struct Kernels {
  MatmulKernels matmul;            // matmul.h: quantised and plain matrices times rows
  ElementwiseKernels elementwise;  // elementwise.h: norms, activations, sums, rope, copies to caches
  AttentionKernels attention;      // attention.h: grouped-query and latent attention
  SelectionKernels selection;      // selection.h: which rows an index selects for attention
  DeltaKernels delta;              // delta.h: conv1d, gates, gated delta
  HyperKernels hyper;              // hyper.h: residual streams, the gate of n-gram embeddings
  RouteKernels route;              // route.h: both routers, top-k
  ChoiceKernels choice;            // choice.h: choosing a token, the same bits with every instruction set
};

}  // namespace moeflux::cpu
