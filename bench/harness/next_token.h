// Which token a decode goes on with, and how long choosing it takes.
#pragma once

#include <cstdint>
#include <memory>

#include "arguments.h"
#include "moeflux.h"

namespace bench {

class NextToken {
 public:
  // Each `session` draws with a seed of its own.
  NextToken(const Arguments& arguments, int64_t vocab_size, int64_t session = 0);

  // The token after the last one of the session: the likeliest, or one that is drawn as --sampling says.
  int32_t after(const moeflux::Session& session);
  // The time spent in `after` so far.
  double seconds() const { return seconds_; }

 private:
  int32_t choose(const moeflux::Session& session);

  std::unique_ptr<moeflux::Sampler> sampler_;  // null: the likeliest
  double seconds_ = 0;
};

}  // namespace bench
