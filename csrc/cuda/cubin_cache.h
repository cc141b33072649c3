// What NVRTC made, kept in the user's cache folder. A file that is damaged, or of another compiler, counts as absent,
// and nothing here may keep a model from being loaded.
#pragma once

#include <optional>
#include <string>

namespace moeflux::cuda {

struct CubinKey {
  std::string text;
  std::string architecture;
  std::string options;
};

// `compiler`: the version that must have made it; empty for any.
std::optional<std::string> cached_cubin(const CubinKey& key, const std::string& compiler);
void cache_cubin(const CubinKey& key, const std::string& compiler, const std::string& cubin);

}  // namespace moeflux::cuda
