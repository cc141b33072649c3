// The blocks in which sessions keep rows of one kind. A session takes one when its rows need it. A block that several
// sessions share is never written. Blocks are memory of the sessions' limit, and nobody holds more than it uses.
//
// Any thread may take blocks and give them back. In a child made by fork they stay where they are: a lock could be held
// there by a thread that the child does not have.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "engine/session_memory.h"

namespace moeflux {

// What a session has of them at most.
struct PlannedRows {
  int64_t blocks = 0;     // of this kind
  int64_t all_bytes = 0;  // of all kinds
};

class RowPool {
  // Memory of blocks that were taken from the system together. It goes back when nobody holds any of them.
  struct Slab {
    std::unique_ptr<Buffer> buffer;
    int64_t bytes = 0;
    std::vector<int32_t> holders;  // of each block
    int64_t in_use = 0;
  };

 public:
  // Blocks of so many bytes.
  RowPool(Backend& backend, SessionMemory& memory, int64_t block_bytes);
  ~RowPool();
  RowPool(const RowPool&) = delete;
  RowPool& operator=(const RowPool&) = delete;

  // What so many blocks take at most.
  static int64_t planned_bytes(int64_t blocks, int64_t block_bytes);

  // One holder's part in a block, given back when it goes. Holders must not outlive the pool.
  class Block {
   public:
    Block() = default;  // none
    Block(Block&& other) noexcept : pool_(std::exchange(other.pool_, nullptr)), slab_(other.slab_), at_(other.at_) {}
    Block& operator=(Block&& other) noexcept {
      std::swap(pool_, other.pool_);
      std::swap(slab_, other.slab_);
      std::swap(at_, other.at_);
      return *this;
    }
    ~Block() {
      if (pool_) pool_->give_back(*this);
    }

    explicit operator bool() const { return pool_ != nullptr; }
    View view() const;
    // Whether others hold it too.
    bool is_shared() const;
    // A part for one holder more.
    Block share() const;

   private:
    friend class RowPool;
    Block(RowPool* pool, std::list<Slab>::iterator slab, int64_t at) : pool_(pool), slab_(slab), at_(at) {}

    RowPool* pool_ = nullptr;
    std::list<Slab>::iterator slab_ = {};
    int64_t at_ = 0;  // in the slab
  };

  // BudgetError as by `take` if so many bytes, of blocks of any kind, are more than what is left. Where blocks lie in
  // slabs, only taking them tells.
  void check(int64_t bytes, const std::string& asker) const;
  // `count` more behind those of `to`. BudgetError that says what `asker` asked for when the sessions' limit has no
  // room. What fails may leave some of them in `to`.
  void take(int64_t count, const PlannedRows& planned, const std::string& asker, std::vector<Block>& to);

  int64_t block_bytes() const { return block_bytes_; }

 private:
  std::list<Slab>::iterator slab_with_room(int64_t count, const PlannedRows& planned, const std::string& asker);
  std::list<Slab>::iterator add_slab(int64_t blocks, const std::string& asker);
  void give_back(const Block& block) noexcept;

  Backend& backend_;
  SessionMemory& memory_;
  int64_t block_bytes_;
  int64_t forks_;  // when it was made
  mutable std::mutex mutex_;
  std::list<Slab> slabs_;
};

// One for each kind of rows.
using RowPools = std::deque<RowPool>;

}  // namespace moeflux
