// What a block waits for besides its own threads: a place in shared memory at which threads arrive and copies do, turn
// after turn. CUDA calls it an mbarrier.
#pragma once
#include <cstdint>
#include <vector>

#include "checker.h"

namespace emulator {

struct Block;
struct Execution;

// Of any number of bytes.
struct LateCopy {
  void* to;
  const void* from;
  uint32_t bytes;
  std::vector<char> early;  // what was there, if the kernel before had not ended
};

struct Arrival {
  const void* place;
  uint32_t threads;       // that arrive in each turn
  uint32_t maker;         // the thread
  uint32_t barriers;      // that the block had passed when it was made
  uint32_t arrived = 0;   // threads, in this turn
  uint64_t expected = 0;  // bytes
  uint64_t asked = 0;     // bytes of copies
  uint32_t turn = 0;
  uint32_t delivery = 0;  // the checker's number of the copies; 0: none was asked for
  std::vector<LateCopy> copies = {};
  std::vector<Release> releases = {}, releases_before = {};  // in this turn, and in the one before

  bool is_complete() const { return arrived == threads && expected == asked; }
  bool is_under_way() const { return arrived || expected || asked || !copies.empty(); }
};

}  // namespace emulator
