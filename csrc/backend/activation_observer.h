// Who is shown what a backend's ops multiply.
#pragma once

#include <cstdint>

#include "backend/backend.h"

namespace moeflux {

// Is shown the rows that matrices have been multiplied with, by a backend whose ops run while they are recorded. What
// it throws is an error of the op.
class ActivationObserver {
 public:
  virtual ~ActivationObserver() = default;
  // n rows of product.matrix.columns. Not shown are rows that a matrix meets transposed.
  virtual void saw(const Product& product, int64_t n) = 0;
  // Experts and their rows. Where down is multiplied with the row of pair p, the jobs' pairs counted one after another,
  // row p of `scratch` begins with these intermediate numbers.
  virtual void saw(const ExpertArgs& experts) = 0;
};

}  // namespace moeflux
