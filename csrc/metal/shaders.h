// The text of the kernels. It is part of the program. For experiments, MOEFLUX_METAL_DIR names a folder whose files are
// used instead.
#pragma once

#include <string>
#include <vector>

namespace moeflux::metal {

// Names of the .metal files without their ending.
std::vector<std::string> shader_files();

// One of the files, with every file of ours that it includes put in its place, as Apple's compiler wants it. Lines keep
// the names of their files. IoError when MOEFLUX_METAL_DIR has no such file.
std::string shader_text(const std::string& file);

}  // namespace moeflux::metal
