// The checkpoints of a session: copies of its recurrent state by position, and rooms for more of them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/backend.h"

namespace moeflux {

class Checkpoints {
 public:
  // Of so many bytes each, without any room.
  Checkpoints(Backend& backend, int64_t bytes) : backend_(backend), bytes_(bytes) {}

  // Takes room for so many more, or for none when the system refuses.
  void add_rooms(int64_t count);
  // Gives back so many that are free.
  void drop_rooms(int64_t count);

  std::vector<int64_t> positions() const;           // ascending
  bool has_any(int64_t first, int64_t last) const;  // at positions first ... last
  // The last position that has one, of all or of those up to `most`; 0 if none has, where the state is known.
  int64_t newest(int64_t most = INT64_MAX) const;
  // The copy at a position. None where there is no checkpoint, and none at 0.
  const Buffer* at(int64_t position) const;
  // Says that the checkpoint at a position is of use. False when there is none.
  bool use(int64_t position);

  // A room for the next one; none when all are taken.
  const Buffer* spare() const { return rooms_.empty() ? nullptr : rooms_.back().get(); }
  // Makes one of what is in the spare room. That of position 0 takes no room.
  void add(int64_t position);
  // Drops the least recently used until `most` are left, but neither position 0 nor `newest`.
  void keep(int64_t most, int64_t newest);
  // Rows behind a position will be written anew, so checkpoints there belong to another timeline.
  void forget_after(int64_t position);

 private:
  struct Checkpoint {
    int64_t position;
    uint64_t used;                      // the clock when it was made or gone back to
    std::unique_ptr<Buffer> recurrent;  // none at position 0
  };

  std::vector<Checkpoint>::iterator not_before(int64_t position);

  Backend& backend_;
  int64_t bytes_;
  std::vector<Checkpoint> checkpoints_;         // ascending by position
  std::vector<std::unique_ptr<Buffer>> rooms_;  // free ones
  uint64_t clock_ = 0;
};

}  // namespace moeflux
