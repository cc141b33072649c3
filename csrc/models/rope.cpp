#include "models/rope.h"

namespace moeflux {

void Rope::check(const Check& check, int64_t channels) const {
  check.limits({{"rope.dim", dim, 1, channels}});
  check.require(dim % 2 == 0, "rope.dim", "an even number", dim);
  check.positive("rope.theta", theta);
  check.limits({{"rope.turning", turning, 0, dim / 2}});
  check.require(!yarn || turning == 0, "rope.turning", "0 with YaRN", turning);
  if (!yarn) return;
  check.positive("rope.yarn.factor", yarn->factor);
  check.positive("rope.yarn.original_context", static_cast<double>(yarn->original_context));
  check.positive("rope.yarn.beta_fast", yarn->beta_fast);
  check.positive("rope.yarn.beta_slow", yarn->beta_slow);
  const auto or_none = [&](std::string_view field, double value) {
    check.require(value >= 0, field, "0 or a positive number", value);
  };
  or_none("rope.yarn.mscale", yarn->mscale);
  or_none("rope.yarn.mscale_all_dim", yarn->mscale_all_dim);
}

}  // namespace moeflux
