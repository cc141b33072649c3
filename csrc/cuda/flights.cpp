#include "cuda/flights.h"

#include <utility>
#include <vector>

namespace moeflux::cuda {

std::string failure_of(Result result) { return concat("cuda: the GPU failed: ", words_of(result)); }

int64_t Flights::depart(std::shared_ptr<Event> end, std::shared_ptr<const void> kept) {
  const std::lock_guard lock(mutex_);
  under_way_.push_back({0, std::move(end), std::move(kept)});  // first, because only a batch that is here can arrive
  return under_way_.back().number = flight_.depart();
}

std::shared_ptr<Event> Flights::end_of(int64_t number) {
  const std::lock_guard lock(mutex_);
  for (const Batch& batch : under_way_)
    if (batch.number == number) return batch.end;
  return nullptr;
}

void Flights::arrive(int64_t number, Result result) {
  std::vector<Batch> ended;  // let go without the lock
  const std::lock_guard lock(mutex_);
  while (!under_way_.empty() && under_way_.front().number <= number) {
    // Nobody knows which of them failed, and what comes behind builds on it.
    flight_.arrive(under_way_.front().number, result == success ? "" : failure_of(result));
    ended.push_back(std::move(under_way_.front()));
    under_way_.pop_front();
  }
}

void Flights::wait(int64_t number) {
  if (const std::shared_ptr<Event> end = end_of(number)) arrive(number, end->wait());
  flight_.wait(number);
}

void Flights::check(int64_t number) { flight_.check(number); }

bool Flights::arrived(int64_t number) {
  if (const std::shared_ptr<Event> end = end_of(number)) {
    const Result result = end->query();
    if (result == error_not_ready) return false;
    arrive(number, result);
  }
  return true;
}

void Flights::wait_for_all() {
  try {
    wait(flight_.departed());
  } catch (const DeviceError&) {  // whoever holds a ticket hears of it
  }
}

}  // namespace moeflux::cuda
