// The whole C++ boundary of moeflux.
//
// An Engine is a loaded model: immutable, shared by any number of sessions, owner of the expert cache. A Session is one
// timeline of tokens: where it stands and what its layers remember. It has one caller at a time. A second caller gets a
// StateError. Calls of sessions of one engine take turns, unless several sessions evaluate in one call
// (`Engine::evaluate`). Engines are independent of each other. A child made by fork has none of an engine's threads, so
// every call of the parent's sessions is a StateError there.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/choices.h"
#include "core/dtype.h"
#include "core/error.h"
#include "core/interruption.h"
#include "core/op_time.h"
#include "core/read_bandwidth.h"
#include "core/shortlist.h"
#include "models/variant.h"
#include "sampling/sampler.h"

namespace moeflux {

struct StoreDirectory;

extern const char* const commit;  // that was built, with a + if files differed from it; or "unknown"

// A long call tells it how much is done: bytes, or tokens after each chunk. If it returns false, the call stops there.
using Progress = std::function<bool(int64_t done, int64_t total)>;

// Some layers of a model: from `first` to the one before `last`.
struct LayerRange {
  int64_t first = 0;
  int64_t last = 0;  // 0: to the model's end
  bool operator==(const LayerRange&) const = default;
};

struct EngineOptions {
  std::string backend = "auto";  // "cpu", "metal", or "auto": the best one that works here
  int device = 0;                // which of several GPUs, by the driver's number
  std::string isa;               // CPU kernels: one of `available_isas`; empty: the best the machine has
  Precision precision = Precision::automatic;
  int threads = 0;           // threads that compute; 0: one per core
  int readers = 0;           // threads that read experts; 0: chosen by the engine
  int64_t expert_slots = 0;  // experts held in memory, that of the device; 0: all of them
  int64_t host_slots = 0;  // on a device with memory of its own, experts held in the host's; none if all have the above
  int ring_depth = 2;      // expert batches that may be in flight
  int64_t chunk = 0;       // largest number of tokens in a prefill chunk; 0: chosen by the engine
  Reads reads = Reads::automatic;
  CachePolicy cache = CachePolicy::lru;
  LookAhead look_ahead = LookAhead::automatic;
  CpuExperts cpu_experts = CpuExperts::off;  // none without host slots, and none but CUDA's
  Speculate speculate = Speculate::off;
  bool verify_reads = false;  // compare every expert with its checksum whenever it is read
  int64_t session_bytes = 0;  // limit for all sessions together, else BudgetError; 0: none
  // On a device with memory of its own, this is for what they have in the host's memory, and the limit before it for
  // the rest; 0: that one is for all.
  int64_t host_session_bytes = 0;
  LayerRange layers = {};  // that the engine has: all, or those of a stage, see `Work`. No `speculate` with the latter
  bool time_ops = false;   // measure the time of each op, for `take_op_times`
  Progress on_load = {};   // is told how many bytes of dense weights are loaded; false ends in StateError
};

struct SessionOptions {
  int64_t max_context = 0;      // tokens at most; 0: the model's own limit, at most 32768
  DType kv_dtype = DType::f32;  // or bf16, or i8: codes, with a scale for each head of a row
  int64_t max_checkpoints = 4;  // room is taken for this many; a checkpoint at position 0 needs none
};

// Bytes of memory by what they are for: planned, or really held. An engine takes all of its memory when it is opened,
// and a session when it is made, but for its rows: those it takes and gives back 256 positions at a time. The system
// provides pages as they are used.
struct Footprint {
  int64_t dense_weights = 0;
  int64_t expert_slots = 0;
  int64_t host_slots = 0;    // of experts, in the host's memory, below those of a device with memory of its own
  int64_t scratch = 0;       // intermediate numbers of a chunk, and what the kernels want for themselves
  int64_t read_buffers = 0;  // of the reading threads, where reads do not go straight into slots; staging
  int64_t tables = 0;        // which expert is where, what is wanted next, checksums
  int64_t ngram_rows = 0;    // of tables of n-gram embeddings: the rows that are kept in memory
  int64_t loading = 0;  // staging while dense weights are read, on a device with memory of its own; then given back
  // For sessions:
  int64_t rows = 0;         // keys and values, or latents, one row per position
  int64_t recurrent = 0;    // state of linear layers, and its copies between drafts
  int64_t checkpoints = 0;  // copies of the recurrent state
  int64_t tokens = 0;       // the tokens themselves, logits, and staging for a device's memory

  int64_t engine() const {
    return dense_weights + expert_slots + host_slots + scratch + read_buffers + tables + ngram_rows + loading;
  }
  int64_t sessions() const { return rows + recurrent + checkpoints + tokens; }
  int64_t total() const { return engine() + sessions(); }
  Footprint& operator+=(const Footprint& other);
};

// What evaluating tokens has cost: in the last call, or in all calls since the session was made.
struct StepStats {
  int64_t tokens = 0;
  double seconds = 0;            // of the whole call
  double compute_seconds = 0;    // recording and running ops
  double read_wait_seconds = 0;  // the call stood still for reads
  // What compute_seconds went to in layers with experts. The rest of it is the end of the call: the last norm and the
  // logits. On a device that computes by itself, these are the host's times for recording and waiting.
  double router_seconds = 0;     // until the router has spoken: the sum of the layer before, attention, norms
  double beside_seconds = 0;     // during the reads: beginning them, the shared expert, experts in slots
  double arrived_seconds = 0;    // experts as they arrive
  double read_busy_seconds = 0;  // at least one read was under way; for the rest of `seconds` the disk was idle
  int64_t bytes_read = 0;        // by reads of experts and of rows, those of the look-ahead included, wanted or not
  // Experts found in a slot, or on their way into one. Where the host does not know the choice of several rows, each
  // row's counts.
  int64_t expert_hits = 0;
  int64_t expert_misses = 0;   // experts that had to be brought and were not on their way
  int64_t host_hits = 0;       // those of them that were in slots of the host's memory, or on their way there
  int64_t experts_on_cpu = 0;  // of host_hits, those that the CPU computed, so that they were not brought
  int64_t bytes_copied = 0;    // of experts, from slots of the host's memory to the device's
  int64_t ngram_hits = 0;      // rows of n-gram tables found in memory, or on their way there
  int64_t ngram_misses = 0;    // rows that had to be read and were not on their way
  int64_t submissions = 0;     // batches given to the backend
  int64_t waits = 0;           // times the host waited for one

  // The look-ahead: experts whose reads it began, those of them that their layer's router then picked, and bytes read
  // for the others. Its recall is used / (used + expert_misses), the share of the experts to be read that it foresaw.
  // Its precision is used / reads, the share of its reads that was wanted.
  int64_t look_ahead_reads = 0;
  int64_t look_ahead_used = 0;
  int64_t look_ahead_wasted_bytes = 0;
  // Whether steps were faster with it, when they were last compared; nothing before that.
  std::optional<bool> look_ahead_pays;

  // Speculation: tokens that were evaluated because they were likely to come next, and those of them that came.
  int64_t drafted = 0;
  int64_t accepted = 0;
  // Whether tokens came faster with drafts, when that was last compared; nothing before that.
  std::optional<bool> drafts_pay;

  StepStats& operator+=(const StepStats& other);
};

// A piece of a session's state. It is valid only during the call that shows it.
struct StateTensor {
  std::string name;   // "k", "v", "latent", "rope_k", "index_k", "conv" or "recurrent"; "k_scale" ... behind codes
  int64_t layer = 0;  // the model's number
  DType dtype = DType::f32;
  // k and v [position, kv_heads, dim]; latent, rope_k, index_k [position, width]; conv [taps - 1, channels]; recurrent
  // [value heads, value dim, key dim]; scales [heads, position]
  std::vector<int64_t> shape;
  int64_t bytes = 0;
  // Copies those of its bytes that begin at `begin`. Several threads may do so at once, for other bytes.
  std::function<void(int64_t begin, std::span<std::byte> to)> read;
  std::function<void(int64_t begin, std::span<const std::byte> from)> write;  // likewise, for `restore`
};

using StateVisitor = std::function<void(std::span<const StateTensor>)>;

// Is told which experts the router picked. It is called for every pass of tokens, of one session or several, once per
// layer with experts, in order. ids [tokens, k] are in router order and valid during the call. The call is part of the
// step: what it throws is an error of the step. Rows of drafts are among them.
using RoutingObserver = std::function<void(int64_t layer, std::span<const int32_t> ids)>;

using LogitsReader = std::function<void(std::span<const float>)>;
using ShortlistReader = std::function<bool(const Shortlist&)>;

// What one call has evaluated.
struct Evaluated {
  int64_t tokens = 0;
  int64_t serial = 0;  // logits_serial() of the logits that it left, even if another call has replaced them since
};

class Session;

// What a call of `Engine::evaluate` is to do for one session, and what became of it.
//
// A model may be cut between its layers into stages, engines that each have some of its layers. All of them are given
// the same tokens. The first makes hidden rows of them, the others take those of the stage before, and the last one has
// the logits. No bit of these depends on the cut. Each stage has a session of its own.
struct Work {
  Session* session = nullptr;
  std::span<const int32_t> tokens = {};   // one or more, after those that the session has
  std::span<float> all_logits = {};       // room for [tokens, vocab] when those of every token are wanted
  bool logits = true;                     // false, and no such room: the session has no logits afterwards
  std::span<const float> hidden_in = {};  // [tokens, width] of the layer before, unless that is none
  std::span<float> hidden_out = {};       // room for [tokens, width], unless the engine has the last layer

  int64_t serial = 0;        // logits_serial() of the logits that it left
  std::string failure = {};  // why this session could not be served, or is unusable now; else empty
};

// Exactly what an engine opened with these options will hold, with one such session. It opens no file and takes no
// memory. Its errors are those of opening.
Footprint footprint(const StoreDirectory& store, const EngineOptions& options = {}, const SessionOptions& session = {});
// The part of it that is in a device's own memory; nothing where host and device share theirs.
Footprint device_footprint(const StoreDirectory& store, const EngineOptions& options = {},
                           const SessionOptions& session = {});

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // Opens a packed store that moeflux wrote.
  static std::shared_ptr<Engine> open(const std::string& folder, const EngineOptions& options = {});
  // Opens any store that has been read and checked.
  static std::shared_ptr<Engine> open(StoreDirectory store, const EngineOptions& options = {});

  virtual ~Engine() = default;
  virtual const Variant& variant() const = 0;  // with the layers that the engine has, and no others
  virtual std::string describe() const = 0;    // backend, threads, slots: one line
  virtual std::string isa() const = 0;         // of the CPU kernels; empty where none run
  virtual std::unique_ptr<Session> session(const SessionOptions& options = {}) = 0;

  // Evaluates tokens of several sessions together, each as its own `prefill` or `step` would, to the same bits. All
  // rows go through a matrix at once, and an expert is read once for all of them. If there are more tokens than a chunk
  // has, there are several passes. Returns what all of it has cost. For each session's `last` and `total` the call
  // counts in full, but for the tokens, which are its own.
  //
  // What throws has evaluated nothing: each session is where it was before the call, if it can go back. It can under
  // the conditions of `prefill`. A session with a single token can also when the failure came before the last pass. The
  // others are unusable: the error names them, and their `failure` says why. If the work for one session is at
  // fault (it is in use, it has no memory for rows, the tokens are wrong), only that `failure` is set. When logits of a
  // session are not finite, nothing is thrown: its `failure` says so, it is unusable, and the others have gone on.
  //
  // With speculation, a single token may be evaluated together with drafts of those that follow it
  // (`Session::foresees`). That changes no logits.
  //
  // `interruption` is called as by `prefill`, as long as every session that has begun can go back. A call that is given
  // up leaves each session where it was, with its logits unless an earlier pass has replaced them.
  virtual StepStats evaluate(std::span<Work> work, const Interruption& interruption = {}) = 0;

  LayerRange layers() const { return {variant().layers_before, variant().layers_before + variant().num_layers()}; }
  virtual int64_t experts() const = 0;  // the routed experts of all layers that it has
  virtual int64_t expert_slots() const = 0;
  virtual int64_t host_slots() const = 0;  // in the host's memory, below those of a device with its own
  // Those of them that have an expert now.
  virtual int64_t filled_slots() const = 0;
  virtual int64_t filled_host_slots() const = 0;
  virtual int64_t chunk() const = 0;  // the most tokens that go through the layers at once
  // What the engine and its sessions hold now.
  virtual Footprint memory() const = 0;
  // The same, counted where memory is given out. If it is not the sum of `memory`, something is missing there.
  virtual int64_t held() const = 0;
  virtual int64_t held_by_device() const = 0;  // the part of that which is in a device's own memory
  virtual int64_t sessions() const = 0;
  // Reads random experts, in this engine's way and for about this long, and returns the bytes per second: what the disk
  // gives when nothing else is done. Waits for the call under way.
  virtual double read_rate(double seconds) = 0;
  // Bytes a second that copies within a device's own memory read and write; 0 where its memory is the host's. They take
  // 1 GiB for that time, which no plan knows of. Waits for the call under way.
  virtual double device_rate() = 0;
  // Bytes of the weights that one step cannot do without: all but the other rows of the embedding and the experts that
  // are not picked.
  virtual int64_t step_bytes() const = 0;
  // What each kind of op has taken since the last call of this function; nothing without the option `time_ops`. Waits
  // for the call under way.
  virtual std::vector<OpTime> take_op_times() = 0;
  // Calls `body` once for each unit 0 ... units - 1, in any order: on the threads that compute, where those are the
  // host's, and in turns with them. An exception ends it, and is thrown when all threads are back. A body must not ask
  // for threads itself.
  virtual void parallel(int64_t units, const std::function<void(int64_t unit)>& body) = 0;
  // Tells `observer` from the next call on, or nobody if it is empty. Waits for the call under way.
  virtual void observe_routing(RoutingObserver observer) = 0;
};

class Session {
 public:
  virtual ~Session() = default;

  virtual int64_t position() const = 0;  // tokens evaluated
  virtual int64_t max_context() const = 0;
  virtual LayerRange layers() const = 0;  // those of its engine
  // The tokens evaluated; empty after a restore that did not give them.
  virtual std::vector<int32_t> tokens() const = 0;

  // StateError with an engine that has not all layers, as `step`: such a session goes on by `Engine::evaluate` alone.
  //
  // Evaluates tokens after those that are there. The logits are those of the last token, or of every token when
  // `all_logits` has room for [tokens, vocab]. When `progress` says to stop, fewer tokens are evaluated, up to the end
  // of a chunk.
  //
  // After an error in a chunk, the session goes back to the chunk's start if it can: if that is position 0, if no layer
  // is recurrent, if there is a checkpoint, or if the chunk has several tokens and there is room for another
  // checkpoint. Otherwise the session is unusable until `clear` or a restore. After logits that are not finite, it is
  // always unusable. BudgetError when there is no memory for the rows of all these tokens: then none is evaluated, and
  // nothing has changed.
  //
  // `interruption` is called while the call waits for its turn, and before each chunk. If the session can go back to
  // the chunk's start, it is also called between layers and between reads. A call that is given up leaves the session
  // at a chunk's start, with the logits that it had there.
  virtual Evaluated prefill(std::span<const int32_t> tokens, const Progress& progress = {},
                            std::span<float> all_logits = {}, const Interruption& interruption = {}) = 0;
  // With a `serial`, StateError when logits_serial() has changed: then the token was chosen from logits that are gone.
  virtual Evaluated step(int32_t token, const Interruption& interruption = {}, std::optional<int64_t> serial = {}) = 0;

  // Whether a call before has evaluated this token as the next one. Then a step with it takes no time, nor does a part
  // of `Engine::evaluate`. Any other token, and whatever looks at the state, drops what was foreseen.
  virtual bool foresees(int32_t token) const = 0;

  // Changes whenever the logits are replaced or dropped.
  virtual int64_t logits_serial() const = 0;
  // The logits of the last token evaluated: [vocab], valid until the next evaluation. StateError when there are none.
  virtual std::span<const float> logits() const = 0;
  // Shows the logits where they lie. No other thread can evaluate meanwhile.
  virtual void read_logits(const LogitsReader& read) const = 0;
  virtual int32_t argmax() const = 0;
  // The same, where the device has found it and the host has no logits yet; for sessions of such a vocabulary.
  virtual std::optional<int32_t> likeliest(int64_t vocab_size) const = 0;
  // Shows the shortlist that the device made of them by this factor. False, and there may be one of the next logits,
  // where there is none. What the reader returns says whether it had all that it needs: then the same.
  virtual bool read_shortlist(int64_t vocab_size, double factor, const ShortlistReader& read) const = 0;
  // The best k, best first.
  virtual void top_k(std::span<int32_t> ids, std::span<float> values) const = 0;

  virtual void clear() = 0;

  // Makes another session with the same options, which stands where this one does, or where it stood at `position`: one
  // that `rewind` goes to exactly. StateError, which has the newest checkpoint before it, otherwise.
  // The fork has the tokens up to there, but no checkpoints; it has the logits if this one stands there. The two share
  // their rows. A fork costs a copy of the recurrent state and of the last block of rows, unless that is full. Neither
  // session notices what the other one does.
  virtual std::unique_ptr<Session> fork(std::optional<int64_t> position = {}) = 0;

  // A checkpoint keeps what the present position needs: a copy of the recurrent state, and the rows that windows see
  // from there, which are the session's own and not copied. When there are more
  // than `max_checkpoints`, the least recently used one goes. Position 0 and the newest go last.
  virtual void checkpoint() = 0;
  virtual std::vector<int64_t> checkpoints() const = 0;  // positions, ascending
  virtual void set_max_checkpoints(int64_t count) = 0;
  // From there on, every position up to the present one has what it needs: 0 if all layers see everything. Layers with
  // windows keep a few rows more than they see. A recurrent layer has the present state alone.
  virtual int64_t exact_from() const = 0;
  // Goes to a position from `exact_from` on, to a checkpoint, or to 0. Any other position is a StateError that
  // names the newest checkpoint at or before `position`. With exact = false, it goes to that checkpoint instead.
  // Returns the position reached.
  virtual int64_t rewind(int64_t position, bool exact = true) = 0;

  // Takes memory for the rows of so many more tokens, for the next call. What that does not use, it gives back.
  // BudgetError when there is too little; nothing has changed then.
  virtual void make_room(int64_t tokens) = 0;
  // Shows all pieces of what the layers remember, in layer order. They are there to read until `show` returns.
  virtual void read_state(const StateVisitor& show) = 0;
  // Replaces all of it with the state after `position` tokens. `tokens` are those tokens, or none when they are not
  // known. `fill` is given all pieces to write. When it throws, the session is unusable until `clear` or another
  // restore. Checkpoints are dropped, and there are no logits until the next evaluation.
  virtual void restore(int64_t position, std::span<const int32_t> tokens, const StateVisitor& fill) = 0;

  virtual StepStats last() const = 0;
  virtual StepStats total() const = 0;
};

}  // namespace moeflux
