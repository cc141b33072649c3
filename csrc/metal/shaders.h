// The text of the kernels, which is part of the program; or, while experimenting, of the files in MOEFLUX_METAL_DIR.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace moeflux::metal {

// Names of the .metal files without their ending.
std::vector<std::string> shader_files();

// One of them with everything that it includes of ours in its place, as Apple's compiler wants it. Lines keep their
// names. IoError when MOEFLUX_METAL_DIR has no such file.
std::string shader_text(const std::string& file);

struct EmbeddedFile {
  std::string_view name;  // "matmul.metal"
  std::string_view text;
};

// Generated: the files of metal/.
extern const EmbeddedFile embedded_files[];
extern const size_t embedded_file_count;

}  // namespace moeflux::metal
