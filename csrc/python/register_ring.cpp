// For tests: the deferred ring and batches that end when a test says so, the look-ahead's governor, and what must not
// be done with the memory of a device. Nothing here is for users.
#include <pybind11/stl.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "core/error.h"
#include "devices/devices.h"
#include "engine/deferred_ring.h"
#include "engine/draft_governor.h"
#include "engine/experts/prefetcher.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace moeflux::python {
namespace {

class HeldBatch {
 public:
  // If there is an error, waiting for the batch throws DeviceError.
  void finish(const std::string& error) {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
      error_ = error;
    }
    ended_.notify_all();
  }

  void wait() {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return done_; });
    if (!error_.empty()) throw DeviceError(error_);
  }

  bool done() const {
    const std::lock_guard lock(mutex_);
    return done_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  std::string error_;
};

class BatchState final : public Ticket::State {
 public:
  explicit BatchState(std::shared_ptr<HeldBatch> batch) : batch_(std::move(batch)) {}
  void wait() override { batch_->wait(); }
  bool done() const override { return batch_->done(); }

 private:
  std::shared_ptr<HeldBatch> batch_;
};

// A ring and the slots of one layer that its batches lease.
class Ring {
 public:
  Ring(int depth, int64_t slots)
      : cache_({}, {1, checked("slots", slots), slots, 0}),
        ring_(std::make_unique<DeferredRing>(static_cast<int>(checked("depth", depth)), static_cast<size_t>(slots))) {}

  // Whoever drops a ring, such as Python's garbage collector, does not wait for batches that nobody may ever end.
  ~Ring() {
    for (const std::weak_ptr<HeldBatch>& each : pushed_)
      if (const std::shared_ptr<HeldBatch> batch = each.lock(); batch && !batch->done()) batch->finish("");
  }

  void push(const std::shared_ptr<HeldBatch>& batch, const std::vector<int64_t>& experts) {
    std::erase_if(pushed_, [](const std::weak_ptr<HeldBatch>& each) { return each.expired(); });
    pushed_.push_back(batch);
    std::vector<Lease> leases;
    for (const int64_t expert : experts) leases.push_back(cache_.acquire(0, expert).lease);
    ring_->push(Ticket(std::make_unique<BatchState>(batch)), leases);
  }

  DeferredRing& ring() {
    if (!ring_) throw StateError("[DeferredRing] expected one that was not destroyed");
    return *ring_;
  }

  void destroy() { ring_.reset(); }
  int64_t leased() const { return cache_.leased(); }

 private:
  static int64_t checked(const char* name, int64_t count) {
    if (count < 1) throw ArgumentError(concat("[DeferredRing] ", name, ": expected at least 1, found ", count));
    return count;
  }

  SlotCache cache_;
  std::unique_ptr<DeferredRing> ring_;
  std::vector<std::weak_ptr<HeldBatch>> pushed_;
};

// What the engine does when a copy is forgotten, on the test device with memory of its own.
void forget_a_copy(const std::string& kind) {
  const std::unique_ptr<Backend> backend = make_backend("cpu", {"", false, 1}, {.apart = true});
  const std::unique_ptr<Buffer> device = backend->allocate(64, Memory::device, "device");
  const std::unique_ptr<Buffer> staging = backend->allocate(64, Memory::staging, "staging");
  const View there = {device.get(), 0};
  const View here = {staging.get(), 0};
  if (kind == "host reads device") std::ignore = *there.host<float>();
  const std::unique_ptr<Commands> commands = backend->begin();
  if (kind == "op reads staging") commands->residual_add(there, here, there, 16);
  if (kind == "op writes staging") commands->rms_norm(there, there, here, 1, 16, 1e-6f);
  if (kind == "copy too long") commands->copy(here, there.at(1), 64);
  if (kind == "copy beside too long") backend->copy(here.at(1), there, 64).wait();
}

}  // namespace

void register_ring(py::module_& m) {
  using released = py::call_guard<Released>;
  Class<HeldBatch, std::shared_ptr<HeldBatch>>(m, "Batch", "For tests: a batch that ends when it is told to.")
      .def(constructor<HeldBatch>())
      .def("finish", &HeldBatch::finish, py::arg("error") = "", released());

  Class<Ring>(m, "DeferredRing", "For tests: batches in flight, and the slots they lease.")
      .def(constructor<Ring, int, int64_t>(), py::arg("depth"), py::arg("slots") = 8)
      .def("push", &Ring::push, py::arg("batch"), py::arg("experts"), released())
      .def(
          "collect", [](Ring& r) { r.ring().collect(); }, released())
      .def(
          "pop", [](Ring& r) { r.ring().pop(); }, released())
      .def(
          "drain", [](Ring& r) { r.ring().drain(); }, released())
      .def("destroy", &Ring::destroy, released())
      .def_property_readonly("empty", [](Ring& r) { return r.ring().empty(); })
      .def_property_readonly("waits", [](Ring& r) { return r.ring().waits(); })
      .def_property_readonly("leased", &Ring::leased);

  m.def("forget_a_copy", &forget_a_copy, py::arg("kind"),
        "For tests: what the engine does when a copy is forgotten, on a device with memory of its own.");

  Class<DraftGovernor>(m, "DraftGovernor", "For tests: decides how many tokens to draft.")
      .def(py::init([] { return std::make_unique<DraftGovernor>(Speculate::automatic); }))
      .def("drafts", &DraftGovernor::drafts, py::arg("longest") = max_drafts,
           "How many a session is to draft, of whose last ones one fewer than `longest` came true.")
      .def_property_readonly("pays", &DraftGovernor::pays)
      .def("add_outcome", &DraftGovernor::add_outcome, py::arg("longest"), py::arg("drafted"), py::arg("came"),
           "So many of those came true and then, if there were more, one did not.")
      .def(
          "add",
          [](DraftGovernor& governor, double seconds, int64_t tokens, int64_t drafted) {
            governor.add({seconds, tokens, drafted});
          },
          py::arg("seconds"), py::arg("tokens"), py::arg("drafted"), "A call has ended.");
  m.def(
      "best_drafts",
      [](const DraftSeconds& seconds, const DraftChances& chances, int64_t least) {
        if (!seconds[0]) throw ArgumentError("seconds: expected those of a call without drafts, found none");
        if (least < 0 || least > max_drafts)
          throw ArgumentError(concat("least: expected 0 to ", max_drafts, ", found ", least));
        return best_drafts(seconds, chances, least);
      },
      py::arg("seconds"), py::arg("chances"), py::arg("least") = 0,
      "For tests: how many drafts bring most tokens a second. `seconds`: of a call with 0 to 4 drafts, None where "
      "nobody "
      "knows. `chances`: how often each comes true where those before it have.");
  Class<LookAheadGovernor>(m, "LookAheadGovernor", "For tests: decides whether steps of one token look ahead.")
      .def(py::init([] { return std::make_unique<LookAheadGovernor>(LookAhead::automatic); }))
      .def_property_readonly("on", &LookAheadGovernor::on)
      .def_property_readonly("pays", &LookAheadGovernor::pays)
      .def(
          "add",
          [](LookAheadGovernor& governor, double seconds, double wait, double busy) {
            governor.add({seconds, wait, busy});
          },
          py::arg("seconds"), py::arg("wait"), py::arg("busy"));
  Class<PrefillGovernor>(m, "PrefillGovernor", "For tests: decides whether calls of several tokens look ahead.")
      .def(py::init([] { return std::make_unique<PrefillGovernor>(LookAhead::automatic); }))
      .def_property_readonly("on", &PrefillGovernor::on)
      .def(
          "add",
          [](PrefillGovernor& governor, int64_t misses, int64_t guesses, int64_t used) {
            governor.add({misses, guesses, used});
          },
          py::arg("misses"), py::arg("guesses"), py::arg("used"));
}

}  // namespace moeflux::python
