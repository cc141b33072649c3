// The NVIDIA GPU of this machine, where there is one.
#pragma once

#include <string>

namespace moeflux::cuda {

// Whether "auto" means it: it works. To find out, a kernel is made ready.
bool is_chosen();
// Why a GPU that should work does not, in the words of whoever refused. Empty when it works, or when there is none.
std::string failure();

// For tests: other libraries in place of NVIDIA's, or with empty names the machine's own.
void set_own_libraries(const std::string& driver, const std::string& compiler);

}  // namespace moeflux::cuda
