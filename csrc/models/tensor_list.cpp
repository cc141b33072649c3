#include "models/tensor_list.h"

namespace moeflux {

void TensorList::gated_mlp(const std::string& name, int64_t intermediate) {
  matrix(name + "gate_proj", intermediate, hidden_);
  matrix(name + "up_proj", intermediate, hidden_);
  matrix(name + "down_proj", hidden_, intermediate);
}

}  // namespace moeflux
