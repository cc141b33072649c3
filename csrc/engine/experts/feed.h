// The feed of a layer's experts. It knows which experts are there to be computed, which are on their way into a slot,
// and which must still be asked for. Whoever computes the layer takes those that are there. Meanwhile the feed reads
// on, for this layer and, as the look-ahead guesses, for the next.
#pragma once

#include <span>
#include <vector>

#include "core/lists.h"
#include "engine/experts/expert_call.h"
#include "engine/experts/expert_groups.h"
#include "engine/experts/expert_slots.h"
#include "engine/experts/experts_on_cpu.h"
#include "engine/experts/prefetcher.h"

namespace moeflux {

class ExpertFeed {
 public:
  // `experts` is how many a layer has. `cpu`, null if there is none, may compute those of one token.
  ExpertFeed(ExpertSlots& slots, Prefetcher& prefetcher, ExpertsOnCpu* cpu, int64_t experts);
  static int64_t planned_tables(int64_t experts) { return planned_bytes<Lists>(experts); }
  int64_t tables() const { return held_bytes(lists_); }

  // The router has spoken. Asks the readers for as many missing experts as have room, and then for those that the next
  // layer will probably pick.
  void begin(const ExpertCall& call, std::span<const ExpertGroups::Group> picked);

  bool arriving() const { return !lists_.arriving.empty(); }
  bool more_to_read() const { return next_missing_ < lists_.missing.size(); }
  // Whether slots are wanted, for this layer or the next.
  bool wants_room() const { return more_to_read() || prefetcher_.wants_more(); }

  // Submits what was recorded, so that its slots come back for experts that are still to be read, or read ahead. Waits
  // for it only when nothing else is under way.
  void make_room(const ExpertCall& call);
  // Waits for batches in flight until every expert is at least on its way.
  void ask_for_all(const ExpertCall& call);

  // Takes in the experts that have arrived. If none has, it waits for one.
  void take_arrived(const ExpertCall& call);
  // Takes the experts that are on their way as if they were there. The batch goes on after their copies, or if there
  // are reads among them, it holds until `let_go`.
  void take_promised(const ExpertCall& call);

  // Records the experts that are there, once each. Their slots are kept until the batch at hand is done.
  void record_experts(const ExpertCall& call);

  // Before the router speaks: records that what experts read comes to the host, if any may be computed there.
  void record_x(const ExpertCall& call);
  // Records where all that were picked lie, and these, which the device looks up there. Those on their way are taken as
  // by `take_promised`. In place of those that the CPU computes the device computes others, of which nobody asks.
  void record_places(const ExpertCall& call);
  void record_chosen(const ExpertCall& call);
  // Records that what the CPU makes of its experts takes the place of these.
  void record_from_cpu(const ExpertCall& call);

  // After a submission: waits for what the batch holds for, and releases it. That is reads, copies, and the CPU. Throws
  // what went wrong.
  void let_go(Recorder& recorder, StepStats& stats);
  void abandon();

 private:
  // An expert on its way into a slot.
  struct Arriving {
    ExpertGroups::Group group;
    Lease lease;
  };
  struct Lists {
    std::vector<ExpertGroups::Group> missing;
    std::vector<Arriving> arriving;
    std::vector<ExpertJob> jobs;  // there, to be recorded next

    template <typename Self, typename Visit>
    static void each(Self& lists, int64_t experts, const Visit& visit) {
      visit(lists.missing, experts);
      visit(lists.arriving, experts);
      visit(lists.jobs, experts);
    }
  };

  void sort_out(const ExpertCall& call, std::span<const ExpertGroups::Group> picked);
  void read_missing(const ExpertCall& call);
  void await_slots(const ExpertCall& call);
  void leave_on_cpu(const ExpertCall& call);
  void take(const ExpertCall& call, const ExpertGroups::Group& group, Lease lease);

  ExpertSlots& slots_;
  Prefetcher& prefetcher_;
  ExpertsOnCpu* cpu_;
  Lists lists_;
  size_t next_missing_ = 0;
  bool holds_for_reads_ = false;
};

}  // namespace moeflux
