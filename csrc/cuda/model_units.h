// Which kernels a model will launch, before it does. What is forgotten here is compiled when it is first wanted.
#pragma once

#include <string>
#include <vector>

#include "backend/work_sizes.h"
#include "core/dtype.h"

namespace moeflux::cuda {

// Units by their names, each once. `rows`: the types of what attention keeps.
std::vector<std::string> units_for(const WorkSizes& sizes, const std::vector<DType>& rows);

}  // namespace moeflux::cuda
