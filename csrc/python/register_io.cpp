// Expert reads and the slot cache, for tests. Nothing here is for users.
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <new>

#include "core/error.h"
#include "io/expert_loader.h"
#include "io/fault_injection.h"
#include "python/bindings.h"
#include "python/store_object.h"

namespace py = pybind11;
namespace fs = std::filesystem;

namespace moeflux::python {
namespace {

using released = py::call_guard<Released>;

template <typename Value>
Value word(const std::string& text, std::initializer_list<std::pair<const char*, Value>> words) {
  for (const auto& [name, value] : words)
    if (text == name) return value;
  throw py::value_error("expected another word, found " + text);
}

ReadMode mode_of(const std::string& text) {
  return word<ReadMode>(text, {{"buffered", ReadMode::buffered}, {"direct", ReadMode::direct}});
}

ReadPriority priority_of(const std::string& text) {
  return word<ReadPriority>(text, {{"demand", ReadPriority::demand}, {"look_ahead", ReadPriority::look_ahead}});
}

FaultKind fault_of(const std::string& text) {
  return word<FaultKind>(text, {{"error", FaultKind::error},
                                {"interrupt", FaultKind::interrupt},
                                {"short_read", FaultKind::short_read},
                                {"end_of_file", FaultKind::end_of_file},
                                {"delay", FaultKind::delay},
                                {"wrong_bytes", FaultKind::wrong_bytes},
                                {"hold", FaultKind::hold}});
}

const char* name_of(SlotCache::Found found) {
  if (found == SlotCache::Found::ready) return "ready";
  return found == SlotCache::Found::loading ? "loading" : "missing";
}

const char* name_of(SlotState state) {
  if (state == SlotState::ready) return "ready";
  return state == SlotState::loading ? "loading" : "empty";
}

py::bytes to_bytes(std::span<const std::byte> data) {
  return {reinterpret_cast<const char*>(data.data()), data.size()};
}

// Zeroed memory that starts at a multiple of direct_alignment.
class Blocks {
 public:
  explicit Blocks(int64_t bytes)
      : data_(static_cast<std::byte*>(::operator new(static_cast<size_t>(bytes), std::align_val_t{direct_alignment})),
              Free{}),
        span_(data_.get(), static_cast<size_t>(bytes)) {
    std::fill(span_.begin(), span_.end(), std::byte{0});
  }
  std::span<std::byte> span() const { return span_; }

 private:
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete(memory, std::align_val_t{direct_alignment}); }
  };
  std::unique_ptr<std::byte, Free> data_;
  std::span<std::byte> span_;
};

ReaderFactory readers(const std::shared_ptr<FaultPlan>& fault) {
  return fault ? faulty_readers(fault) : file_readers();
}

// ---- Reading ---------------------------------------------------------------------------------------------------

py::bytes read_here(Reader& reader, int64_t offset, int64_t bytes, int64_t misalign, int64_t bounce) {
  if (offset < 0 || bytes < 0 || misalign < 0) throw py::value_error("expected no negative number");
  const Blocks room(bytes + misalign + 1);
  const Blocks scratch(bounce);
  const auto into = room.span().subspan(static_cast<size_t>(misalign), static_cast<size_t>(bytes));
  {
    const Released release;
    reader.read(offset, into, scratch.span());
  }
  if (room.span().back() != std::byte{0}) throw py::value_error("the byte after the destination was written");
  return to_bytes(into);
}

// A place that no read reaches. What is carried there arrives when a test says so, and not before.
class FarPlace {
 public:
  FarPlace(int threads, int64_t bytes) : rooms_(threads * staging_bytes), far_(bytes) {}
  std::span<std::byte> rooms() const { return rooms_.span(); }
  Carry carry() {
    return [this](std::span<const std::byte> bytes, int64_t place) {
      auto copy = std::make_shared<Copy>(bytes, far_.span().subspan(static_cast<size_t>(place), bytes.size()));
      const std::lock_guard lock(mutex_);
      copies_.push_back(copy);
      if (at_once_) copy->end(true);
      return copy;
    };
  }
  size_t begun() const {
    const std::lock_guard lock(mutex_);
    return copies_.size();
  }
  void end(size_t index, bool well) {
    const std::lock_guard lock(mutex_);
    copies_.at(index)->end(well);
  }
  void end_all() {
    const std::lock_guard lock(mutex_);
    at_once_ = true;
    for (const std::shared_ptr<Copy>& copy : copies_) copy->end(true);
  }
  py::bytes data(int64_t place, int64_t bytes) const {
    return to_bytes(far_.span().subspan(static_cast<size_t>(place), static_cast<size_t>(bytes)));
  }

 private:
  class Copy final : public Carried {
   public:
    Copy(std::span<const std::byte> from, std::span<std::byte> to) : from_(from), to_(to) {}
    bool done() const override {
      const std::lock_guard lock(mutex_);
      return ended_;
    }
    void wait() override {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ended_; });
      if (!well_) throw DeviceError("the copy failed");
    }
    void end(bool well) {
      const std::lock_guard lock(mutex_);
      if (ended_) return;
      if (well) std::ranges::copy(from_, to_.begin());
      ended_ = true;
      well_ = well;
      changed_.notify_all();
    }

   private:
    std::span<const std::byte> from_;
    std::span<std::byte> to_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    bool ended_ = false;
    bool well_ = false;
  };

  Blocks rooms_;
  Blocks far_;
  mutable std::mutex mutex_;
  bool at_once_ = false;
  std::vector<std::shared_ptr<Copy>> copies_;  // in the order in which they began
};

// A batch with its destinations and the readers it uses.
class Batch {
 public:
  void add(std::shared_ptr<Reader> reader, int64_t offset, int64_t bytes) {
    rooms_.emplace_back(bytes);
    batch_.add({reader.get(), offset, rooms_.back().span()});
    readers_.push_back(std::move(reader));
  }
  void add_carried(std::shared_ptr<Reader> reader, int64_t offset, int64_t bytes, int64_t place) {
    batch_.add({reader.get(), offset, Landing::carried(place, bytes)});
    readers_.push_back(std::move(reader));
  }
  void submit(ReadPool& pool, ReadPriority priority) { pool.submit(batch_, priority); }
  py::bytes data(size_t index) const { return to_bytes(rooms_.at(index).span()); }
  ReadBatch& batch() { return batch_; }

 private:
  std::vector<Blocks> rooms_;
  std::vector<std::shared_ptr<Reader>> readers_;
  ReadBatch batch_;  // last: it goes first
};

void register_reading(py::module_& m) {
  Class<FaultPlan, std::shared_ptr<FaultPlan>>(m, "FaultPlan", "For tests: the read that goes wrong, and how.")
      .def(py::init([](const std::string& kind, int64_t at, bool lasting) {
             auto plan = std::make_shared<FaultPlan>();
             plan->kind = fault_of(kind);
             plan->at = at;
             plan->lasting = lasting;
             return plan;
           }),
           py::arg("kind"), py::arg("at"), py::arg("lasting") = false)
      .def("release", &FaultPlan::release, "Lets reads go on that are held.")
      .def_property_readonly("calls", [](const FaultPlan& plan) { return plan.calls.load(); });

  Class<Reader, std::shared_ptr<Reader>>(m, "FileReader", "For tests: a file that experts are read from.")
      .def(py::init([](const fs::path& path, const std::string& mode, const std::shared_ptr<FaultPlan>& fault) {
             return std::shared_ptr<Reader>(readers(fault)(path.string(), mode_of(mode)));
           }),
           py::arg("path"), py::arg("mode") = "buffered", py::arg("fault") = py::none())
      .def("read", &read_here, py::arg("offset"), py::arg("bytes"), py::arg("misalign") = 0,
           py::arg("bounce") = bounce_bytes, "Reads to a place `misalign` bytes after a block's start.")
      .def("check_unchanged", &Reader::check_unchanged)
      .def_property_readonly("bytes", &Reader::bytes)
      .def_property_readonly(
          "counts", [](const Reader& r) { return py::make_tuple(r.counts().calls, r.counts().bytes); },
          "(calls, bytes): how often the system was called, and what it gave.");
  m.def(
      "supports_direct", [](const fs::path& path) { return supports_direct(path.string()); }, py::arg("path"),
      "Whether the file's file system has direct reads.");

  Class<FarPlace>(m, "FarPlace", "For tests: a place that no read reaches.")
      .def(constructor<FarPlace, int, int64_t>(), py::arg("threads"), py::arg("bytes"))
      .def_property_readonly("begun", &FarPlace::begun, "How many copies to it have begun.")
      .def("end", &FarPlace::end, py::arg("index"), py::arg("well") = true, "Lets a copy arrive, or fail.")
      .def("end_all", &FarPlace::end_all, "Lets all arrive, from now on at once.")
      .def("data", &FarPlace::data, py::arg("place"), py::arg("bytes"));

  Class<ReadPool, std::shared_ptr<ReadPool>>(m, "ReadPool", "For tests: threads that read.")
      .def(py::init([](int threads, int64_t bounce, FarPlace* place) {
             return place ? std::make_shared<ReadPool>(threads, bounce, place->rooms(), place->carry())
                          : std::make_shared<ReadPool>(threads, bounce);
           }),
           py::arg("threads"), py::arg("bounce") = 0, py::arg("place") = py::none(), py::keep_alive<1, 4>())
      .def_property_readonly("memory", &ReadPool::memory)
      .def_property_readonly("stats", [](const ReadPool& pool) {
        const ReadPoolStats s = pool.stats();
        return py::dict(py::arg("demand_reads") = s.demand_reads, py::arg("demand_bytes") = s.demand_bytes,
                        py::arg("look_ahead_reads") = s.look_ahead_reads,
                        py::arg("look_ahead_bytes") = s.look_ahead_bytes, py::arg("busy_seconds") = s.busy_seconds);
      });

  Class<Batch>(m, "ReadBatch", "For tests: reads that are waited for together.")
      .def(constructor<Batch>())
      .def("add", &Batch::add, py::arg("reader"), py::arg("offset"), py::arg("bytes"))
      .def("add_carried", &Batch::add_carried, py::arg("reader"), py::arg("offset"), py::arg("bytes"), py::arg("place"))
      .def(
          "submit",
          [](Batch& batch, ReadPool& pool, const std::string& priority) { batch.submit(pool, priority_of(priority)); },
          py::arg("pool"), py::arg("priority") = "demand")
      .def(
          "wait", [](Batch& batch) { return batch.batch().wait(); }, released())
      .def("cancel", [](Batch& batch) { batch.batch().cancel(); })
      .def("promote", [](Batch& batch) { batch.batch().promote(); })
      .def_property_readonly("done", [](Batch& batch) { return batch.batch().done(); })
      .def("data", &Batch::data, py::arg("index"));
}

// ---- Cache -----------------------------------------------------------------------------------------------------

py::dict to_python(const SlotCacheStats& s) {
  return py::dict(py::arg("hits") = s.hits, py::arg("joined") = s.joined, py::arg("misses") = s.misses,
                  py::arg("evictions") = s.evictions, py::arg("failures") = s.failures, py::arg("guesses") = s.guesses,
                  py::arg("guesses_used") = s.guesses_used, py::arg("guesses_wasted") = s.guesses_wasted);
}

// A cache with its memory.
struct CacheObject {
  CacheObject(const SlotCacheShape& shape, CachePolicy policy, int64_t ageing_period)
      : memory(shape.slots * shape.slot_bytes), cache(memory.span(), shape, policy, ageing_period) {}
  Blocks memory;
  SlotCache cache;
};

struct LeaseObject {
  std::shared_ptr<void> owner;  // of the cache; it goes after the lease
  Lease lease;

  Lease& held() {
    if (!lease) throw StateError("[Lease] expected one that was not released");
    return lease;
  }
};

py::object lease_or_none(std::shared_ptr<void> owner, Lease lease) {
  if (!lease) return py::none();
  return py::cast(std::make_unique<LeaseObject>(LeaseObject{std::move(owner), std::move(lease)}));
}

py::tuple to_python(const std::shared_ptr<void>& owner, SlotCache::Acquired acquired) {
  return py::make_tuple(lease_or_none(owner, std::move(acquired.lease)), name_of(acquired.found));
}

void write(LeaseObject& object, const std::string& text) {
  const std::span<std::byte> slot = object.held().data();
  if (text.size() > slot.size()) throw py::value_error("expected what fits into the slot");
  std::copy_n(reinterpret_cast<const std::byte*>(text.data()), text.size(), slot.begin());
}

void register_cache(py::module_& m) {
  Class<LeaseObject, std::unique_ptr<LeaseObject>>(m, "Lease",
                                                   "For tests: keeps a slot from being used for another expert.")
      .def_property_readonly("slot", [](LeaseObject& o) { return o.held().slot(); })
      .def_property_readonly("layer", [](LeaseObject& o) { return o.held().layer(); })
      .def_property_readonly("expert", [](LeaseObject& o) { return o.held().expert(); })
      .def_property_readonly("state", [](LeaseObject& o) { return name_of(o.held().state()); })
      .def_property_readonly("data", [](LeaseObject& o) { return to_bytes(o.held().data()); })
      .def("write", &write, py::arg("data"))
      .def("release", [](LeaseObject& o) { o.lease.release(); });

  using Object = std::shared_ptr<CacheObject>;
  Class<CacheObject, Object>(m, "SlotCache", "For tests: experts in a fixed number of slots.")
      .def(py::init([](int64_t layers, int64_t experts, int64_t slots, int64_t slot_bytes, const std::string& policy,
                       int64_t ageing_period) {
             if (slots < 0 || slot_bytes < 0) throw py::value_error("expected no negative number");
             return std::make_shared<CacheObject>(SlotCacheShape{layers, experts, slots, slot_bytes},
                                                  choice_of<CachePolicy>("policy", policy), ageing_period);
           }),
           py::arg("layers"), py::arg("experts"), py::arg("slots"), py::arg("slot_bytes") = 0,
           py::arg("policy") = "lru", py::arg("ageing_period") = 0)
      .def(
          "acquire",
          [](const Object& o, int64_t layer, int64_t expert) { return to_python(o, o->cache.acquire(layer, expert)); },
          py::arg("layer"), py::arg("expert"), "(lease, \"ready\", \"loading\" or \"missing\")")
      .def(
          "guess",
          [](const Object& o, int64_t layer, int64_t expert, int64_t keep) {
            return lease_or_none(o, o->cache.guess(layer, expert, keep));
          },
          py::arg("layer"), py::arg("expert"), py::arg("keep") = 0)
      .def(
          "share", [](const Object& o, LeaseObject& lease) { return lease_or_none(o, o->cache.share(lease.held())); },
          py::arg("lease"))
      .def(
          "loaded", [](const Object& o, LeaseObject& lease) { o->cache.loaded(lease.held()); }, py::arg("lease"))
      .def(
          "failed", [](const Object& o, LeaseObject& lease) { o->cache.failed(lease.held()); }, py::arg("lease"))
      .def(
          "drop", [](const Object& o, int64_t layer, int64_t expert) { return o->cache.drop(layer, expert); },
          py::arg("layer"), py::arg("expert"))
      .def("drop_all", [](const Object& o) { o->cache.drop_all(); })
      .def(
          "contains", [](const Object& o, int64_t layer, int64_t expert) { return o->cache.contains(layer, expert); },
          py::arg("layer"), py::arg("expert"))
      .def_property_readonly("spare", [](const Object& o) { return o->cache.spare(); })
      .def_property_readonly("leased", [](const Object& o) { return o->cache.leased(); })
      .def_property_readonly("stats", [](const Object& o) { return to_python(o->cache.stats()); });
}

// ---- Experts ---------------------------------------------------------------------------------------------------

// The whole path from a store to slots. Members go in reverse order: the loader goes first, and waits for what is
// under way.
struct Experts {
  Experts(const StoreDirectory& directory, const ExpertStoreOptions& options, int64_t slots, int threads,
          CachePolicy policy, ExpertCheck check)
      : store(directory, options),
        pool(threads, store.bounce()),
        memory(slots * store.slot().bytes),
        cache(memory.span(), {store.layers(), store.experts_per_layer(), slots, store.slot().bytes}, policy),
        loader(store, pool, cache, std::move(check)) {}

  ExpertStore store;
  ReadPool pool;
  Blocks memory;
  SlotCache cache;
  ExpertLoader loader;
};

using ExpertsObject = std::shared_ptr<Experts>;

ExpertCheck check_of(const py::object& function) {
  if (function.is_none()) return {};
  // The function is copied and destroyed where the interpreter's lock may not be held.
  const auto drop = [](py::object* object) {
    const Acquired acquire;
    delete object;
  };
  const std::shared_ptr<py::object> shared(new py::object(function), drop);
  return [shared](int64_t layer, int64_t expert, const Landing& slot) {
    const Acquired acquire;
    if (!call_back(*shared, layer, expert, to_bytes(slot.memory())).cast<bool>())
      throw IoError(concat("layer ", layer, " expert ", expert, ": expected the bytes of its checksum, found others"));
  };
}

ExpertsObject open_experts(const Store& store, int64_t slots, int threads, const std::string& mode,
                           const std::string& policy, const std::shared_ptr<FaultPlan>& fault,
                           const py::object& check) {
  if (slots < 1 || threads < 1) throw py::value_error("expected at least one slot and one thread");
  // Destroying it waits for threads that may be in a check.
  const auto destroy = [](Experts* experts) {
    const Released release;
    delete experts;
  };
  return {new Experts(store.directory, ExpertStoreOptions{mode_of(mode), readers(fault)}, slots, threads,
                      choice_of<CachePolicy>("policy", policy), check_of(check)),
          destroy};
}

void register_loading(py::module_& m) {
  Class<Experts, ExpertsObject>(m, "Experts", "For tests: experts of a store, read into slots.")
      .def(py::init(&open_experts), py::arg("store"), py::arg("slots"), py::arg("threads") = 2,
           py::arg("mode") = "buffered", py::arg("policy") = "lru", py::arg("fault") = py::none(),
           py::arg("check") = py::none())
      .def(
          "demand",
          [](const ExpertsObject& o, int64_t layer, int64_t expert, int64_t parts) {
            if (parts < 1) throw py::value_error("expected at least one part");
            SlotCache::Acquired acquired;
            {
              const Released release;  // it may wait for a thread that is in a check
              acquired = o->loader.demand(layer, expert, parts);
            }
            return to_python(o, std::move(acquired));
          },
          py::arg("layer"), py::arg("expert"), py::arg("parts") = 1)
      .def(
          "guess",
          [](const ExpertsObject& o, int64_t layer, int64_t expert, int64_t keep, int64_t parts) {
            return o->loader.guess(layer, expert, keep, parts);
          },
          py::arg("layer"), py::arg("expert"), py::arg("keep") = 0, py::arg("parts") = 1)
      .def(
          "wait", [](const ExpertsObject& o, LeaseObject& lease) { o->loader.wait(lease.held()); }, py::arg("lease"),
          released())
      .def(
          "done", [](const ExpertsObject& o, LeaseObject& lease) { return o->loader.done(lease.held()); },
          py::arg("lease"))
      .def(
          "dismiss", [](const ExpertsObject& o, int64_t layer, int64_t expert) { o->loader.dismiss(layer, expert); },
          py::arg("layer"), py::arg("expert"))
      .def(
          "collect", [](const ExpertsObject& o) { o->loader.collect(); }, released())
      .def(
          "give_up", [](const ExpertsObject& o) { o->loader.give_up(); }, released())
      .def("drop_all", [](const ExpertsObject& o) { o->cache.drop_all(); })
      .def(
          "check_unchanged", [](const ExpertsObject& o) { o->store.check_unchanged(); }, released())
      .def(
          "contains",
          [](const ExpertsObject& o, int64_t layer, int64_t expert) { return o->cache.contains(layer, expert); },
          py::arg("layer"), py::arg("expert"))
      .def_property_readonly("contiguous", [](const ExpertsObject& o) { return o->store.contiguous(); })
      .def_property_readonly("bounce", [](const ExpertsObject& o) { return o->store.bounce(); })
      .def_property_readonly("slot_bytes", [](const ExpertsObject& o) { return o->store.slot().bytes; })
      .def_property_readonly("offsets", [](const ExpertsObject& o) { return o->store.slot().offsets; })
      .def_property_readonly("spare", [](const ExpertsObject& o) { return o->cache.spare(); })
      .def_property_readonly("stats", [](const ExpertsObject& o) { return to_python(o->cache.stats()); })
      .def_property_readonly("counts", [](const ExpertsObject& o) {
        const ReadCounts counts = o->store.counts();
        return py::make_tuple(counts.calls, counts.bytes);
      });
}

}  // namespace

void register_io(py::module_& m) {
  register_reading(m);
  register_cache(m);
  register_loading(m);
}

}  // namespace moeflux::python
