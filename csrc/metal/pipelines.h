// Kernels made ready to run: compiled file by file, each a pipeline of its own.
//
// All of them are made when a model is loaded, or earlier, when somebody asks whether Metal works here. So what a
// driver refuses is known then, and nobody waits for a compiler in the middle of a text.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "metal/device.h"

namespace moeflux::metal {

class Pipelines {
 public:
  struct Ready {
    std::unique_ptr<Pipeline> pipeline;
    uint32_t threads;  // of its threadgroups; if any number will do, the fewest
  };

  explicit Pipelines(Device& device) : device_(device) {}

  // It is made when somebody first asks for it. DeviceError when the driver refuses it, or has too little room for its
  // threads.
  const Ready& get(const std::string& file, const std::string& kernel);
  // Every kernel of a file; returns how many there are.
  int64_t make_all(const std::string& file);
  // Those for GGUF's blocks only if there are such.
  void make_all(bool has_blocks);

 private:
  void compile(const std::string& file);

  Device& device_;
  std::unordered_set<std::string> compiled_;  // files
  std::unordered_map<std::string, Ready> ready_;
};

}  // namespace moeflux::metal
