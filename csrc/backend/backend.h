// What the engine asks of a device: memory, ops recorded in order, and the promise of their completion.
//
// The engine knows this header and no device. Ops run in the order in which they were recorded, and batches in the
// order in which they were submitted. An op sees what every earlier one wrote. Arguments are trusted: whoever records
// an op has checked its shapes.
//
// In shapes, n is the number of rows (tokens) of this call. Activations are f32, row-major. A stride counts elements.
// An op may write where it reads only where its comment says "in place".
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "backend/ticket.h"
#include "backend/work_sizes.h"
#include "core/dtype.h"
#include "core/file.h"
#include "core/quant_format.h"

namespace moeflux {

// ---- Memory ---------------------------------------------------------------------------------------------------------

// Who reaches a buffer. If host and device share one memory, both reach every buffer, whatever was asked for.
enum class Memory {
  device,        // ops reach it, the host only by copies
  host_visible,  // both reach it, the device slowly: for a few numbers that are written or read once
  staging,       // the host reaches it, and copies to and from the device's memory do, but ops do not
};

// Whoever allocated it owns it. It must outlive every batch that uses it.
class Buffer {
 public:
  virtual ~Buffer() = default;
  Memory memory() const { return memory_; }
  int64_t bytes() const { return bytes_; }
  // The address for ops, and for the backend of the buffer.
  std::byte* data() const { return data_; }
  // The address for the host, and for everybody else. std::logic_error if the host does not reach it.
  std::byte* host() const;

 protected:
  Buffer(std::byte* data, int64_t bytes, Memory memory = Memory::device) : Buffer(data, data, bytes, memory) {}
  Buffer(std::byte* data, std::byte* host, int64_t bytes, Memory memory)
      : data_(data), host_(host), bytes_(bytes), memory_(memory) {}
  std::byte* data_;
  std::byte* host_;  // null where the host does not reach it
  int64_t bytes_;
  Memory memory_;
};

// A place in a buffer, which is borrowed. It is empty for an optional argument that is not given.
struct View {
  const Buffer* buffer = nullptr;
  int64_t offset = 0;  // bytes

  explicit operator bool() const { return buffer != nullptr; }
  template <typename T = std::byte>
  T* host() const {
    return reinterpret_cast<T*>(buffer->host() + offset);
  }
  // As ops address it.
  std::byte* bytes() const { return buffer->data() + offset; }
  float* f32() const { return reinterpret_cast<float*>(bytes()); }
  int32_t* i32() const { return reinterpret_cast<int32_t*>(bytes()); }
  View at(int64_t elements, int64_t element_bytes = 4) const { return {buffer, offset + elements * element_bytes}; }
};

// A weight matrix [rows, columns] as stored, applied to a vector of `columns` numbers.
struct Matrix {
  QuantFormat format;
  int64_t rows = 0;
  int64_t columns = 0;
  View weight;  // codes, or plain elements
  View scales;  // empty for a plain format
  View biases;

  // Rows first ... first + count - 1, such as the matrix of one head of a stack.
  Matrix slice(int64_t first, int64_t count) const;
};

// Heads side by side in rows that may hold other things too: head j of row i is the `dim` numbers at
// view + i * row_stride + j * head_stride.
struct Heads {
  View view;
  int64_t heads = 0;
  int64_t dim = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

// Rows that a session keeps: keys, values, latents. They lie in blocks of so many, together with other rows of the same
// positions. Row i is `width` numbers of type `dtype` (f32 or bf16) in block i / block_rows, where row i % block_rows
// of those that begin `offset` bytes behind the block's first.
//
// Where `dtype` is i8, the numbers are codes, and those of a head share a scale: a number is its code times the scale.
// Behind the codes of a block are its scales, bf16 [heads, block_rows].
// Where several positions share a row, a block has so many fewer of them, and rows are counted as they are.
constexpr int64_t block_rows = 256;

struct Cache {
  std::span<const View> blocks;  // as far as an op meets rows, empty before; borrowed for the call that records
  int64_t offset = 0;
  DType dtype = DType::f32;
  int64_t width = 0;
  int64_t head = 0;  // numbers that share a scale; of codes only
  int64_t unit = 1;  // positions that share a row; divides block_rows

  int64_t rows() const { return block_rows / unit; }                                      // of a block
  int64_t row_bytes() const { return width * static_cast<int64_t>(dtype_bytes(dtype)); }  // without scales
  int64_t scales() const { return dtype == DType::i8 ? width / head : 0; }                // of a row
  int64_t scales_offset() const { return offset + rows() * row_bytes(); }
  int64_t block_bytes() const { return rows() * (row_bytes() + scales() * 2); }
};

// The three matrices of one routed expert, in a slot that is leased until the batch has completed. All experts of one
// op lie in one buffer, each with its matrices at the same offsets from its first byte.
struct ExpertMatrices {
  Matrix gate;  // [m, h]
  Matrix up;    // [m, h]
  Matrix down;  // [h, m]
};

// ---- Arguments of the ops --------------------------------------------------------------------------------------

struct Product {
  View x;  // n rows of matrix.columns
  int64_t x_stride = 0;
  Matrix matrix;
  View out;  // n rows of matrix.rows
  int64_t out_stride = 0;
  bool transposed = false;  // out = x . W instead of W . x: n rows of matrix.rows in, of matrix.columns out
};

struct AttentionArgs {
  Heads q;
  Cache k;                     // rows 0 ... first_position + n - 1 are filled; width kv_heads * q.dim
  Cache v;                     // in the same blocks
  int64_t kv_heads = 0;        // query heads j * (heads / kv_heads) ... share key head j
  int64_t first_position = 0;  // of the n rows: row i attends to cache rows 0 ... first_position + i
  float scale = 0;
  View out;            // [n, q.heads * q.dim]
  View sinks;          // [q.heads] or empty: a score that each head has besides, without a value
  int64_t window = 0;  // a row attends to no more than the last so many rows, its own among them; 0: to all
};

struct LatentAttentionArgs {
  Heads q_latent;  // dim rank: the queries taken into the latent space
  Heads q_pe;      // dim rope
  Cache latent;    // width rank
  Cache k_pe;      // width rope; in the same blocks
  int64_t first_position = 0;
  float scale = 0;
  View out;  // [n, heads, rank]: the weighted latents
};

// What the rows of a call may attend to where an index selects it. Rows are selected by units: `unit` positions each,
// which share an index key. A row at position p sees the units that end with p or before: (p + 1) / unit of them. If
// they are more than `count`, it selects so many. If not, it attends to all rows up to its own, and nothing is selected
// for it. It always attends to the rows behind the last unit that it sees.
constexpr int64_t units_seen(int64_t position, int64_t unit) { return (position + 1) / unit; }

// How many rows the row at a position attends to if it selects `count` units.
constexpr int64_t selected_rows(int64_t position, int64_t unit, int64_t count) {
  return count * unit + (position + 1) % unit;
}

struct IndexScoresArgs {
  Heads q;          // the queries of the index
  View weights;     // [n, q.heads], or empty: 1 for each
  float scale = 1;  // of products; above 0
  Cache keys;       // row u is that of unit u; width q.dim
  int64_t first_position = 0;
  View scores;         // [n, stride]: row i has those of the units that it sees
  int64_t stride = 0;  // at least as many as the last row sees
};

struct IndexSelectArgs {
  View scores;  // as index_scores left them
  int64_t stride = 0;
  int64_t first_position = 0;
  int64_t unit = 1;
  int64_t count = 0;
  View ids;  // i32 [n, count]: units in ascending order; a row that sees no more than `count` is left alone
};

struct GatherRowsArgs {
  Cache from;
  View ids;  // i32 [count], of one row
  int64_t unit = 1;
  int64_t count = 0;
  int64_t position = 0;  // of the row that they were selected for
  Cache to;              // its rows 0 ... selected_rows - 1; of the same type and width
};

struct ConvArgs {
  View x;  // [n, channels]
  int64_t channels = 0;
  int64_t taps = 0;
  View state;            // [kept(), channels], oldest first; becomes the last rows of the input
  View weight;           // [channels, taps] f32
  View out;              // [n, channels], after SiLU
  int64_t dilation = 1;  // rows from one tap to the next

  int64_t kept() const { return (taps - 1) * dilation; }
};

// Residual streams that lie side by side: a row of them is [streams, width].
struct HyperMixArgs {
  View normed;  // [n, streams, width]: the streams, each by its own norm
  View gates;   // [n, streams, width]
  int64_t streams = 0;
  int64_t width = 0;
  View out;  // [n, width] = the mean over the streams of normed * sigmoid(gates)
};

struct HyperAddArgs {
  View x;      // [n, streams, width]; stream j += y * 2 sigmoid(gates[j] / streams). In place, always.
  View y;      // [n, width]
  View gates;  // [n, streams]
  int64_t streams = 0;
  int64_t width = 0;
};

struct NgramGateArgs {
  View key;    // [n, streams, width]
  View query;  // [n, streams, width]
  View value;  // [n, width]
  int64_t streams = 0;
  int64_t width = 0;
  View out;  // [n, streams, width] = value * sigmoid(g), g being the signed root of key . query / sqrt(width)
};

struct DeltaGatesArgs {
  View alpha;    // [n, heads]
  View b;        // [n, heads]
  View a_log;    // [heads]
  View dt_bias;  // [heads]
  int64_t heads = 0;
  View decay;  // [n, heads] = exp(-exp(a_log) * softplus(alpha + dt_bias))
  View beta;   // [n, heads] = sigmoid(b)
};

struct DeltaArgs {
  Heads q;                // key heads, normalised and scaled
  Heads k;                // key heads, normalised
  Heads v;                // value heads; a multiple of the key heads
  View decay;             // [n, value heads]
  View beta;              // [n, value heads]
  View state;             // [value heads, v.dim, k.dim]; updated
  View out;               // [n, value heads, v.dim]
  bool tiled = false;     // value head i takes key head i % k.heads; otherwise neighbours share one
  bool has_room = false;  // behind the state is what Backend::delta_room wants

  // The key head of value head i is i / neighbours() % k.heads.
  int64_t neighbours() const { return tiled ? 1 : v.heads / k.heads; }
};

struct RouteArgs {
  View logits;  // [n, experts]
  int64_t experts = 0;
  int64_t k = 0;
  bool normalize = true;
  float scaling = 1;
  View bias;           // [experts]; route_grouped only
  View factors = {};   // [experts] or empty: by which a weight is multiplied at last; route_softmax only
  int64_t groups = 0;  // route_softmax: 0 is none
  int64_t groups_kept = 0;
  View ids;      // i32 [n, k], best first, the earlier expert on ties
  View weights;  // [n, k]
};

// One expert and the rows that go through it.
struct ExpertJob {
  ExpertMatrices expert;
  const int32_t* pairs = nullptr;  // token * k + place in the router's order; borrowed for the call that records them
  int64_t count = 0;
  int64_t index = 0;  // of the expert in its layer
};

// What the experts of a layer do besides their products.
struct ExpertFlavour {
  View gate_bias;   // f32 [experts, m]; all three are empty without biases
  View up_bias;     // f32 [experts, m]
  View down_bias;   // f32 [experts, h]
  float alpha = 0;  // of clamped_swiglu, which takes the place of swiglu where `limit` is not 0
  float limit = 0;
  bool geglu = false;  // takes the place of swiglu, too
};

struct ExpertArgs {
  View x;            // [n, h]
  int64_t rows = 0;  // n
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t k = 0;
  std::span<const ExpertJob> jobs;  // borrowed for the call that records them
  View scratch;                     // [n * k, 2 * m]
  View out;                         // [n * k, h]: the output of pair p in row p, so arrival order changes no bit
  ExpertFlavour flavour = {};
  int64_t layer = 0;  // for observers
};

// The same for experts that the host does not know: a router on the device chose them. Nobody else gets their slots
// meanwhile.
struct ChosenExpertArgs {
  View x;  // [n, h]
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t k = 0;
  View ids;              // i32 [n, k]
  int64_t experts = 0;   // of the layer
  View slots;            // u64 [experts]: the first byte of each expert, in the buffer with the matrices
  ExpertMatrices first;  // the matrices of a slot that begins at byte 0
  View scratch;          // [n * k, 2 * m]
  View out;              // [n * k, h]
  ExpertFlavour flavour = {};
  int64_t alignment = 1;                 // every slot begins at a multiple of it
  int64_t layer = 0;                     // for observers
  std::optional<RouteArgs> choice = {};  // route_softmax of `ids`, if its logits are still there: it may be made again
};

struct CombineArgs {
  View residual;  // [n, h] or empty
  View outputs;   // [n, k, h]
  View weights;   // [n, k]
  int64_t hidden = 0;
  int64_t k = 0;
  View shared;       // [n, h] or empty
  View shared_gate;  // [n] or empty; shared is multiplied by its sigmoid
  View out;          // [n, h] = (residual + sum in router order) + shared; in place with a residual, always
};

struct CopyArgs {
  View from;
  View to;
  int64_t bytes = 0;
};

// Of logits, where they are to be drawn from by others than the device.
struct ShortlistArgs {
  View logits;
  View head;  // ShortlistHead
  View list;  // as ShortlistLayout has it
  double factor = 0;
};

// ---- Recording -------------------------------------------------------------------------------------------------

// A batch of ops being recorded. Op names are the words that the oracle, the kernels, the tests and the benches use.
class Commands {
 public:
  virtual ~Commands() = default;

  // ids i32 [n] -> out [n, table.columns]
  virtual void embed(const Matrix& table, View ids, View out, int64_t n) = 0;
  // Rows of `width`; weight [width]. In place.
  virtual void rms_norm(View x, View weight, View out, int64_t n, int64_t width, float eps) = 0;
  // Each head by itself: x * rsqrt(mean(x * x) + eps) * weight[dim] (1 when empty) * scale. In place, always.
  virtual void rms_norm_heads(const Heads& x, View weight, int64_t n, float eps, float scale) = 0;
  // (x - mean(x)) * rsqrt(variance(x) + eps) * weight + bias, rows of `width`; weight, bias [width]. In place, always.
  virtual void layer_norm(View x, View weight, View bias, int64_t n, int64_t width, float eps) = 0;
  // rms_norm(x) * weight[dim] * silu(z), head by head. In place, always.
  virtual void gated_rms_norm(const Heads& x, const Heads& z, View weight, int64_t n, float eps) = 0;
  // Every product is of the same n rows; they may run side by side.
  virtual void matmul(std::span<const Product> products, int64_t n) = 0;
  // Rotates the first 2 * half channels of every head in place. angles [n, half, 2]: cosine, sine.
  virtual void rope(const Heads& x, View angles, int64_t half, bool interleaved, int64_t n) = 0;
  // Copies n rows of cache.width to rows first ... of the cache, rounding to its type (codes: oracle.quantize_rows).
  virtual void append(View x, int64_t x_stride, const Cache& cache, int64_t first, int64_t n) = 0;
  virtual void attention(const AttentionArgs& args, int64_t n) = 0;
  virtual void mla_attention(const LatentAttentionArgs& args, int64_t n) = 0;
  // What units are worth to each of n rows: the sum of weight * relu(scale * q . key) over the heads, in their order.
  virtual void index_scores(const IndexScoresArgs& args, int64_t n) = 0;
  // The units with the greatest scores, the lower unit on ties. NaN is less than any number.
  virtual void index_select(const IndexSelectArgs& args, int64_t n) = 0;
  // Copies what a row selected, and the rows behind the last unit that it sees, in ascending order.
  virtual void gather_rows(const GatherRowsArgs& args) = 0;
  virtual void conv1d(const ConvArgs& args, int64_t n) = 0;
  virtual void delta_gates(const DeltaGatesArgs& args, int64_t n) = 0;
  virtual void gated_delta(const DeltaArgs& args, int64_t n) = 0;
  virtual void route_softmax(const RouteArgs& args, int64_t n) = 0;
  virtual void route_grouped(const RouteArgs& args, int64_t n) = 0;
  virtual void expert_ffn(const ExpertArgs& args) = 0;
  virtual void chosen_expert_ffn(const ChosenExpertArgs& args, int64_t n) = 0;
  // out = silu(gate) * up, `count` numbers. In place with gate, always.
  virtual void swiglu(View gate, View up, View out, int64_t count) = 0;
  // out = gelu(gate) * up, `count` numbers, by the tanh approximation of gelu. In place with gate, always.
  virtual void geglu(View gate, View up, View out, int64_t count) = 0;
  virtual void combine(const CombineArgs& args, int64_t n) = 0;
  // out = x + y, `count` numbers. In place with x, always.
  virtual void residual_add(View x, View y, View out, int64_t count) = 0;
  // x += bias [width], in each of n rows. In place, always.
  virtual void bias_add(View x, View bias, int64_t n, int64_t width) = 0;
  // x *= factor, `count` numbers. In place, always.
  virtual void scale(View x, float factor, int64_t count) = 0;
  // x = cap * tanh(x / cap), `count` numbers. In place, always.
  virtual void soft_cap(View x, float cap, int64_t count) = 0;
  // x = silu(x * factor), `count` numbers. In place, always.
  virtual void silu(View x, float factor, int64_t count) = 0;
  // Streams of `width`, each normed by itself; weight [streams, width]. Not in place.
  virtual void hyper_norm(View x, View weight, View out, int64_t n, int64_t streams, int64_t width, float eps) = 0;
  virtual void hyper_mix(const HyperMixArgs& args, int64_t n) = 0;
  virtual void hyper_add(const HyperAddArgs& args, int64_t n) = 0;
  virtual void ngram_gate(const NgramGateArgs& args, int64_t n) = 0;
  // x *= sigmoid(gate), head by head. In place, always.
  virtual void sigmoid_gate(const Heads& x, const Heads& gate, int64_t n) = 0;
  // The k best of `count` logits: ids i32 [k] and values [k], best first, the lower id on ties.
  virtual void top_k(View logits, int64_t count, int64_t k, View ids, View values) = 0;
  // found i32 [2]: the best of `count` logits, as top_k has it, and the first that is not finite, or -1. So the host
  // need not have the logits. Where memory is shared, nobody asks.
  virtual void survey(View logits, int64_t count, View found);
  // The same, and the greatest of `count` logits, and what blocks of them weigh. Each row by itself.
  virtual void shortlist(std::span<const ShortlistArgs> rows, int64_t count);
  // `bytes` of one buffer to another, of whatever memory, at multiples of 4.
  virtual void copy(View from, View to, int64_t bytes) = 0;

  // `Ticket::reach` waits for what was recorded before this. It is called at most once per batch. A backend may ignore
  // it, and then `reach` waits for the whole batch.
  virtual void mark() {}
  // What is recorded after this begins when the host calls `Backend::release` with the number that this returns. Only
  // for backends with `runs_on_submit`. Whoever holds a batch releases it after its submission, whatever fails: a batch
  // that nobody releases never ends.
  virtual int64_t hold();
  // What is recorded after this begins when a copy beside the batches is over. Whether it went well is what its ticket
  // says. The caller keeps that until the batch is submitted. Only for backends with `runs_on_submit`.
  virtual void after(const Ticket& copy);
};

class ActivationObserver;

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string name() const = 0;           // "cpu", "metal"
  virtual std::string describe() const = 0;       // "cpu: avx512, 2 threads"
  virtual std::string isa() const { return {}; }  // of the kernels, when they run on the CPU
  // Whether host and device share one memory, so that nothing has to be copied from one to the other.
  virtual bool shares_memory() const { return true; }
  // Whether its commands can survey logits and make shortlists. A device whose memory is the host's need not, unless a
  // test gives it one of its own.
  virtual bool surveys() const { return true; }
  // Zeroed, page-aligned memory. `what` names it in errors.
  virtual std::unique_ptr<Buffer> allocate(int64_t bytes, Memory memory, const std::string& what) = 0;
  // Maps `bytes` of a file from `begin` on, which is the start of a page. Nothing is copied, and nobody may write. Null
  // for a device that computes faster, or only, from memory of its own.
  virtual std::unique_ptr<Buffer> map(const File& file, int64_t begin, int64_t bytes, const std::string& what);
  // Takes the memory that ops of these sizes need besides their arguments, so that no step allocates. It is called
  // once, before the first batch, and returns the bytes.
  virtual int64_t prepare(const WorkSizes& sizes) = 0;
  // Bytes taken from the system: the buffers that exist, and what `prepare` took.
  virtual int64_t held() const = 0;
  // The part of that which is in the device's own memory; 0 where there is none.
  virtual int64_t held_by_device() const { return 0; }
  virtual std::unique_ptr<Commands> begin() = 0;
  virtual Ticket submit(std::unique_ptr<Commands> commands) = 0;
  // Whether a batch may be recorded long before it is submitted, or never is, while others are recorded and submitted
  // that come before it. Then whoever knows what comes next may record it while the device is at work.
  virtual bool records_ahead() const { return false; }
  // Does of such a batch's submission what can be done before, so that `submit` has only to begin it. Batches under way
  // go on. Nothing is recorded after this. What the host has for the batch to copy is taken by the device from now on,
  // and stays as it is until the batch has ended or is dropped. Throws what recording or this has failed with; then the
  // batch is to be dropped.
  virtual void settle(Commands& commands);
  // They copy, and write zeros, outside of batches and from any thread. No batch under way may use the memory.
  Ticket copy(View from, View to, int64_t bytes) { return copy_all(std::array{CopyArgs{from, to, bytes}}); }
  virtual Ticket copy_all(std::span<const CopyArgs> copies);  // one ticket: when the last of them has ended
  virtual Ticket clear(View to, int64_t bytes);
  virtual DeltaRoom delta_room() const { return nullptr; }  // null: it wants none
  // Takes the tokens behind the state of a delta-net into it, so that the host may read that. As copy does.
  virtual Ticket complete(View /*state*/, int64_t /*heads*/) { return {}; }
  // In how many buffers the blocks of one Cache may lie; 0: any number.
  virtual int64_t max_row_buffers() const { return 0; }
  // Whether ops run after their batch was submitted, and not while they are recorded. Only then can a batch be told to
  // hold.
  virtual bool runs_on_submit() const { return false; }
  // Whether chosen_expert_ffn reads each expert once for all of several rows.
  virtual bool groups_chosen() const { return false; }
  // Calls `body` once for each unit 0 ... units - 1: other work of the host, on the threads of the ops if there are
  // any.
  virtual void parallel(int64_t units, const std::function<void(int64_t unit)>& body) {
    for (int64_t unit = 0; unit < units; ++unit) body(unit);
  }
  // Lets batches go on that hold at this number or an earlier one.
  virtual void release(int64_t /*number*/) {}
  // Shows activations to `observer`, which is borrowed, in the batches that begin from now on; null: to nobody.
  // DeviceError where ops do not run while they are recorded.
  virtual void observe(ActivationObserver* observer);
};

}  // namespace moeflux
