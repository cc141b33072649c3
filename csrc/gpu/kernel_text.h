// The text of a GPU's kernels. It is part of the program. For experiments, an environment variable names a folder whose
// files are used instead of the GPU's own.
#pragma once

#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace moeflux::gpu {

struct EmbeddedFile {
  std::string_view name;  // "matmul.metal"
  std::string_view text;
};

struct KernelTexts {
  std::span<const EmbeddedFile> embedded;
  std::string_view ending;  // of a file that has kernels; others are included
  const char* folder;       // the environment variable

  // Files that have kernels, without their ending.
  std::vector<std::string> names() const;
  // One of them, with every file of ours that it includes put in its place. Lines keep the names of their files.
  // IoError when the folder has no such file.
  std::string text(const std::string& name) const;

 private:
  std::string file_text(const std::string& file) const;
  void add(const std::string& file, std::set<std::string>& seen, std::string& text) const;
};

// Generated: the files of metal/ and of cuda/, and those of gpu/, which both include.
std::span<const EmbeddedFile> metal_files();
std::span<const EmbeddedFile> cuda_files();
std::span<const EmbeddedFile> gpu_files();

}  // namespace moeflux::gpu
