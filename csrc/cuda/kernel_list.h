// Which kernels there are, and what is compiled together: small files as they are, and of large ones each kernel by
// itself, because a model needs few of them.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace moeflux::cuda {

struct KernelFile {
  std::string name;  // without its ending
  std::vector<std::string> kernels;
  bool is_apart = false;  // whether each kernel is a unit; else the file is one
};
std::span<const KernelFile> kernel_files();

// What is compiled at a time. All of a file that has its kernels apart is one, too, for those who want them all.
struct Unit {
  std::string file;
  std::string kernel;  // empty: all of the file

  const std::string& name() const { return kernel.empty() ? file : kernel; }
};
// By the name of a kernel, the unit that has it; by that of a file, all of it. DeviceError when there is neither.
Unit unit_of(const std::string& name);
// Those in which a file is compiled for a model.
std::vector<Unit> units_of(const KernelFile& file);

}  // namespace moeflux::cuda
