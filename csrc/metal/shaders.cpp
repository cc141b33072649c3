#include "metal/shaders.h"

#include "gpu/kernel_text.h"

namespace moeflux::metal {
namespace {

gpu::KernelTexts texts() { return {gpu::metal_files(), ".metal", "MOEFLUX_METAL_DIR"}; }

}  // namespace

std::vector<std::string> shader_files() { return texts().names(); }

std::string shader_text(const std::string& file) { return texts().text(file); }

}  // namespace moeflux::metal
