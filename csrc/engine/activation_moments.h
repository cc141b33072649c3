// Adds up the squares of what matrices are multiplied with, a column each, over all rows that an engine shows. From
// them conversion knows which columns of a matrix matter.
//
// Sums are f64, row by row in the order of the tokens, so they do not depend on how tokens are cut into chunks, on
// which expert arrives first, or on threads. With look-ahead, a router also meets what the layer before guesses with.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "backend/activation_observer.h"
#include "engine/weights.h"
#include "format/store_directory.h"

namespace moeflux {

class ActivationMoments final : public ActivationObserver {
 public:
  struct Sums {
    int64_t rows = 0;
    std::vector<double> squares;  // [columns]
  };
  struct Experts {
    Sums input;                   // of gate and up, which all experts of a layer have in common
    std::vector<int64_t> rows;    // that each expert was picked for
    std::vector<double> squares;  // [experts, intermediate]: the input of down of each
    int64_t left_of_pass = 0;     // pairs of the pass under way that have not come yet
  };

  explicit ActivationMoments(const Variant& variant);

  // Finds the matrices of a store in the memory that it was loaded to.
  void place(const StoreDirectory& store, const DenseWeights& weights, bool has_draft);

  void saw(const Product& product, int64_t n) override;
  void saw(const ExpertArgs& experts) override;

  // What has been seen. Not while it is being observed.
  std::map<std::string, Sums> dense() const;                              // by the name of the matrix
  const std::map<int64_t, Experts>& experts() const { return experts_; }  // by layer

 private:
  struct Placed {
    const std::byte* end;
    std::string name;
  };

  const Placed* at(const std::byte* address) const;

  int64_t expert_count_;
  std::map<const std::byte*, Placed> placed_;  // by first byte
  std::map<const std::byte*, Sums> dense_;     // by first byte: of a stack, each matrix by itself
  std::map<int64_t, Experts> experts_;
};

}  // namespace moeflux
