// NVRTC whose cubins name a library that the emulator made of the text.
#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "device.h"

namespace {

struct Program {
  std::string text;
  std::string said;
  std::string cubin;
};

CudaBuild build = nullptr;

Program* as_program(void* program) { return static_cast<Program*>(program); }

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void nvrtc_build_with(CudaBuild other) { build = other; }

// Kernels that are checked are other kernels, so another compiler has made them.
EXPORT int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = nvidia::emulation().checked, 0; }
EXPORT const char* nvrtcGetErrorString(int result) { return result == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR"; }
EXPORT int nvrtcGetNumSupportedArchs(int* count) { return *count = 4, 0; }
EXPORT int nvrtcGetSupportedArchs(int* known) {
  const int all[] = {75, 80, 90, 120};
  return std::memcpy(known, all, sizeof all), 0;
}
EXPORT int nvrtcCreateProgram(void** program, const char* text, const char*, int headers, const char* const*,
                              const char* const*) {
  if (headers) return 3;
  return *program = new Program{text, "", ""}, 0;
}
EXPORT int nvrtcDestroyProgram(void** program) { return delete as_program(*program), 0; }
EXPORT int nvrtcCompileProgram(void* program, int count, const char* const* options) {
  constexpr std::string_view option = "--gpu-architecture=";
  const auto chosen =
      std::find_if(options, options + count, [&](std::string_view each) { return each.starts_with(option); });
  if (chosen == options + count) return 5;
  std::vector<char> answer(1 << 16);
  Program& made = *as_program(program);
  if (!build(made.text.c_str(), *chosen + option.size(), nvidia::emulation().checked, answer.data(), answer.size()))
    return made.said = answer.data(), 6;
  return made.cubin = std::string("moeflux stand-in cubin\n") + answer.data() + "\n", 0;
}
EXPORT int nvrtcGetProgramLogSize(void* program, size_t* bytes) {
  return *bytes = as_program(program)->said.size() + 1, 0;
}
EXPORT int nvrtcGetProgramLog(void* program, char* said) {
  return std::strcpy(said, as_program(program)->said.c_str()), 0;
}
EXPORT int nvrtcGetCUBINSize(void* program, size_t* bytes) { return *bytes = as_program(program)->cubin.size(), 0; }
EXPORT int nvrtcGetCUBIN(void* program, char* cubin) {
  const std::string& made = as_program(program)->cubin;
  return std::memcpy(cubin, made.data(), made.size()), 0;
}
