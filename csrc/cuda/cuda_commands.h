// Every op as launches: which kernel, on which grid, with which arguments. Below that is Launches.
//
// Where a launch can do the work of the op after it, or of the one before, they are one launch. So the last launches
// wait for the next op. Everything that the ops by themselves would have written is written, with the same bits.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "backend/backend.h"
#include "cuda/launches.h"
#include "cuda/params.h"
#include "cuda/words.h"
#include "gpu/attention_task.h"
#include "gpu/products.h"

namespace moeflux::cuda {

inline uint32_t divide_up(int64_t value, int64_t by) { return static_cast<uint32_t>((value + by - 1) / by); }

// Of the delta-net, by how many numbers of a key a thread has room for.
inline const char* delta_kernel(int64_t key_dim) {
  return key_dim <= 4 * int64_t{lanes} ? "gated_delta_4" : "gated_delta_8";
}

// Spans that so many chunks are in, wherever the first begins.
inline uint32_t spans_of(uint32_t chunks) { return divide_up(chunks, span_chunks) + 1; }

// Whether what is written would be read by another block of the same launch.
inline bool meet(const float* a, int64_t a_count, const float* b, int64_t b_count) {
  return a < b + b_count && b < a + a_count;
}

// The recurrence of the session that is so many behind the first, where their rows lie one after the other.
inline DeltaParams delta_behind(const DeltaParams& first, size_t count, float* state) {
  DeltaParams behind = first;
  behind.q += count * first.q_row_stride;
  behind.k += count * first.k_row_stride;
  behind.v += count * first.v_row_stride;
  behind.decay += count * first.value_heads;
  behind.beta += count * first.value_heads;
  behind.out += count * first.value_heads * first.value_dim;
  behind.state = state;
  return behind;
}

class CudaCommands : public Commands {
 public:
  explicit CudaCommands(Launches& launches) : launches_(launches) {}

  // What ops need besides their arguments, for Launches::room, and the lists of one batch.
  static std::vector<RoomSize> rooms(const WorkSizes& sizes);
  static int64_t list_bytes(const WorkSizes& sizes);
  // Parts of attention that the rows of a step have room for together. One row may have more, up to these.
  static int64_t most_parts_of_row(int64_t heads, int64_t dim);
  static constexpr int64_t most_parts = 4096;  // their multipliers are in shared memory
  static constexpr int64_t most_part_bytes = int64_t{64} << 20;

  void embed(const Matrix& table, View ids, View out, int64_t n) override;
  void rms_norm(View x, View weight, View out, int64_t n, int64_t width, float eps) override;
  void rms_norm_heads(const Heads& x, View weight, int64_t n, float eps, float scale) override;
  void layer_norm(View x, View weight, View bias, int64_t n, int64_t width, float eps) override;
  void gated_rms_norm(const Heads& x, const Heads& z, View weight, int64_t n, float eps) override;
  void matmul(std::span<const Product> products, int64_t n) override;
  void rope(const Heads& x, View angles, int64_t half, bool interleaved, int64_t n) override;
  void append(View x, int64_t x_stride, const Cache& cache, int64_t first, int64_t n) override;
  void attention(const AttentionArgs& args, int64_t n) override;
  void mla_attention(const LatentAttentionArgs& args, int64_t n) override;
  void index_scores(const IndexScoresArgs& args, int64_t n) override;
  void index_select(const IndexSelectArgs& args, int64_t n) override;
  void gather_rows(const GatherRowsArgs& args) override;
  void conv1d(const ConvArgs& args, int64_t n) override;
  void delta_gates(const DeltaGatesArgs& args, int64_t n) override;
  void gated_delta(const DeltaArgs& args, int64_t n) override;
  void route_softmax(const RouteArgs& args, int64_t n) override;
  void route_grouped(const RouteArgs& args, int64_t n) override;
  void expert_ffn(const ExpertArgs& args) override;
  void chosen_expert_ffn(const ChosenExpertArgs& args, int64_t n) override;
  void swiglu(View gate, View up, View out, int64_t count) override;
  void geglu(View gate, View up, View out, int64_t count) override;
  void combine(const CombineArgs& args, int64_t n) override;
  void residual_add(View x, View y, View out, int64_t count) override;
  void bias_add(View x, View bias, int64_t n, int64_t width) override;
  void scale(View x, float factor, int64_t count) override;
  void soft_cap(View x, float cap, int64_t count) override;
  void silu(View x, float factor, int64_t count) override;
  void hyper_norm(View x, View weight, View out, int64_t n, int64_t streams, int64_t width, float eps) override;
  void hyper_mix(const HyperMixArgs& args, int64_t n) override;
  void hyper_add(const HyperAddArgs& args, int64_t n) override;
  void ngram_gate(const NgramGateArgs& args, int64_t n) override;
  void sigmoid_gate(const Heads& x, const Heads& gate, int64_t n) override;
  void top_k(View logits, int64_t count, int64_t k, View ids, View values) override;
  void survey(View logits, int64_t count, View found) override;
  void shortlist(std::span<const ShortlistArgs> rows, int64_t count) override;
  void copy(View from, View to, int64_t bytes) override;
  void mark() override;
  int64_t hold() override;
  void after(const Ticket& copy) override;
  // Launches what waits. Nothing is recorded after this.
  void end();

 private:
  // Rooms, by their numbers.
  enum Room : size_t {
    parts,
    digits,
    groups,
    chosen,
    picked_values,
    picked_ids = picked_values + 2,
    surveyed = picked_ids + 2,
    heads_before_norm,
    convolved_before_norm,
    room_count
  };

  using Second = gpu::Second;
  // A list of CachedRows, and what it was made of.
  struct RowTable {
    uint64_t first;
    std::vector<const std::byte*> blocks;
    const CachedRows* rows;  // as kernels address it
  };

  // A list of what each session has, as kernels address it.
  struct SessionTable {
    std::vector<const void*> sessions;
    const std::byte* list;
  };

  // What may wait. A product has one row, and is of the first `count` matrices.
  struct RowProduct {
    std::string kernel;
    OneRowParams params;
    size_t count;
    bool is_copied;  // to shared memory, if there is room
  };
  // A router's products, its choice, and the shared expert: none of it launched yet, in this order. Its gate and up are
  // the last two of the products, if there are such.
  struct FeedForward {
    RowProduct products;
    RouteParams route;
    std::optional<RowProduct> down{};
  };
  // Of blocks of pairs, or of a router's choice.
  struct Lists {
    const ExpertBlock* blocks = nullptr;
    const uint32_t* pairs = nullptr;
    // Instead, if the router's choice is on the device:
    const uint8_t* slots = nullptr;
    const uint64_t* slot_of = nullptr;
    const int* ids = nullptr;

    int64_t count = 0;                   // of blocks, or of the choice's pairs
    int64_t rows = 0;                    // of a block
    bool are_aligned = false;            // all slots, to 16 bytes
    bool are_tiles = false;              // of some rows, whose experts' tiles come to shared memory
    bool has_gate_up = false;            // then: gate and up are one launch, and down is the next
    uint32_t experts = 0;                // then: that the router chose from
    std::optional<RowsParams> shared{};  // down of the shared expert, which goes with theirs
    const float* shared_x = nullptr;
  };
  // Down of the experts that a router chose for one row, and perhaps of the shared one.
  struct ExpertOutputs {
    Lists lists;
    Matrix matrix;
    View bias;
    View x;
    View out;
    const float* weights;  // of the router's choice
    uint32_t experts;      // that it chose from
    std::optional<RowProduct> shared;
  };
  // Some rows: a sum of experts that may go with the norm behind it, that norm, the gated norms of heads.
  struct RowsSum {
    CombineParams params;
  };
  struct RowsNorm {
    NormParams params;
    uint32_t n;
    std::optional<CombineParams> sum{};  // which is x
    std::optional<FlatParams> added{};   // likewise
  };
  struct RowsHeads {
    HeadParams params;
  };
  // Of any number of rows: a sum with the residual, SwiGLU.
  struct RowsAdded {
    FlatParams params;
  };
  struct RowsGated {
    SwigluParams params;
  };
  // The delta-net of one row of each of some sessions, as far as it has come: its inputs, the recurrence of the first
  // sessions, the gated norms of heads.
  struct DeltaStep {
    DeltaInputsParams inputs;
    uint32_t n;
    std::string kernel{};  // of the recurrence, and the first session's
    Extent grid{};
    DeltaParams delta{};
    std::vector<float*> states{};
    std::optional<HeadParams> heads{};
  };
  // One or more rows, each of another session.
  struct AttentionOutput {
    std::string kind;
    AttentionParams params;
    uint32_t tiles;
    bool has_large_tiles;  // of many rows
    uint32_t row_bytes;    // of shared memory where that has the keys and values of one row's parts; else 0
    std::vector<const CachedRows*> sessions;
    bool has_latents = false;  // keys and values at once, and tiles of many heads

    // Whether a merge makes whole groups of what products multiply.
    bool makes_groups() const { return !has_large_tiles && params.part_count > 0 && params.dim % merge_numbers == 0; }
  };
  // What makes rows of x with their digits; if nothing does, x is there.
  using RowsSource = std::variant<std::monostate, RowsNorm, RowsHeads, RowsGated, DeltaStep, AttentionOutput>;
  // Products of some rows.
  struct RowsProduct {
    RowsParams params;
    size_t count;  // of matrices
    const float* x;
    uint32_t x_stride;
    RowsSource source{};
  };
  // As FeedForward.
  struct RowsForward {
    RowsProduct products;
    RouteParams route;
    std::optional<RowsProduct> down{};
  };
  // Digits that are in their room.
  struct MadeDigits {
    DigitsParams params;
    uint32_t fragments;  // of each
    uint32_t batch;
  };
  // One or more rows, each of another session; so are those below.
  struct Appended {
    std::string kernel;
    AppendParams params;
    std::vector<const CachedRows*> sessions;
  };
  // Of one row, in this order, as far as they have come: norms of q and k, their ropes, the keys that are kept.
  struct HeadsRow {
    HeadsRowParams params{};
    int count = 0;  // of these ops
    std::string append{};
  };
  // The same of some rows, each of another session.
  struct RowsAppended {
    HeadsRow heads;
    std::vector<const CachedRows*> keys{};
    std::vector<const CachedRows*> values{};
  };
  struct Convolved {
    ConvParams params;
    std::vector<float*> sessions;
    std::optional<HeadParams> q{};  // norms behind it
    std::optional<HeadParams> k{};
  };
  // Of one row: products with the convolution of the first, and what has come of norms of queries and keys and of
  // gates.
  struct DeltaInputs {
    RowProduct products;
    HeadParams q;
    std::optional<HeadParams> k;
    std::optional<DeltaGatesParams> gates;
  };
  struct DeltaRow {
    std::string kernel;
    Extent grid;
    DeltaParams params;
    std::vector<float*> sessions;
    std::optional<HeadParams> gate;  // of a single session: the gated norm behind it
  };

  // Of as many bytes each.
  struct Copies {
    std::vector<WordsPlaces> places;
    int64_t bytes;
  };
  struct Surveys {
    std::vector<ShortlistRow> rows;  // logits and head alone
    int64_t count;                   // of each row's logits
  };

  template <typename Body>
  void op(const char* name, const Body& body) {
    launches_.op(name, body);
  }
  template <typename Params>
  void launch(const std::string& kernel, Extent grid, uint32_t threads, const Params& params,
              uint32_t shared_bytes = 0) {
    finish();
    made_.reset();
    launches_.launch(kernel.c_str(), grid, threads, params, shared_bytes);
  }
  // A thread for each of `extent`, in whole blocks along the first axis.
  template <typename Params>
  void flat(const std::string& kernel, const Params& params, int64_t x, int64_t y = 1, int64_t z = 1) {
    launch(kernel, {divide_up(x, flat_threads), static_cast<uint32_t>(y), static_cast<uint32_t>(z)}, flat_threads,
           params);
  }
  // A warp for each of `heads`.
  template <typename Params>
  void by_heads(const char* kernel, const Params& params, int64_t heads) {
    launch(kernel, {divide_up(heads, head_warps)}, head_warps * lanes, params);
  }
  template <typename T>
  T* room(size_t which, int64_t bytes) {
    return address<T>(launches_.room(which, bytes));
  }

  template <typename Waiting>
  void wait_with(Waiting&& waiting) {
    finish();
    waiting_ = std::forward<Waiting>(waiting);
  }
  void finish();
  void launch_row(const RowProduct& product);
  static bool may_be_copied(const Matrix& matrix, int64_t base);
  // How many tiles a block goes through, how many of them have a place at once, and how many are added up together.
  struct CopiedRoom {
    uint32_t of_block;
    uint32_t places;
    uint32_t together;
    uint32_t threads;
    uint32_t bytes;
    uint32_t tile_parts = 0;  // of the columns, that a tile has, if it has not all
  };
  std::optional<CopiedRoom> copied_room(uint32_t columns, uint32_t bits, uint32_t tiles) const;
  std::optional<CopiedRoom> wide_room(uint32_t columns, uint32_t bits, uint32_t tiles, uint32_t pairs) const;
  bool launch_copied(const RowProduct& product, OneRowParams& params);
  RowProduct* waiting_products();
  static RouteParams route_params(const RouteArgs& args);
  static bool is_few(const RouteArgs& args);  // experts, without groups
  void launch_choice(uint32_t rows, const RouteParams& route);
  bool takes_route(const RouteParams& route);
  bool takes_shared(const RowProduct& products);
  std::optional<RowProduct> waiting_down(const RoutedParams& routed, int64_t made) const;
  bool takes_choice(const ChosenExpertArgs& args, const Lists& lists);
  void launch_outputs(const ExpertOutputs& outputs);
  bool takes_sum(const CombineParams& sum);
  bool takes_norm(OneRowParams& params, std::span<const Product> products);
  bool takes_swiglu(View gate, View up, int64_t count);
  bool takes_residual(View x, View y, int64_t count);
  bool takes_taps(const ConvParams& params);
  bool takes_gates(DeltaParams& delta);
  bool takes_gate(const Heads& x, const Heads& gate, int64_t n);
  bool takes_convolved_norm(const HeadParams& norm);
  bool takes_row_gates(const DeltaGatesParams& gates);
  void launch_inputs(const DeltaInputs& inputs);
  bool takes_inputs(DeltaParams& delta);
  bool takes_gated_norm(const HeadParams& params);
  void launch_delta(const DeltaRow& delta, float* out);
  bool takes_heads(RowProduct& product);

  // Of some rows.
  bool may_be_rows(std::span<const Product> products, int64_t n) const;
  bool multiply_rows(std::span<const Product> products, int64_t n);
  bool sum_waits(const CombineParams& sum);
  bool norm_waits(const NormParams& norm, int64_t n);
  bool heads_wait(const HeadParams& heads);
  void launch_rows(const RowsProduct& product);
  RowsSource take_source(const float* x, int64_t n, uint32_t columns, uint32_t stride);
  void make_digits(const MadeDigits& wanted, const RowsSource& source);
  static bool keeps_digits(const MadeDigits& made, const float* out, int64_t count);
  void launch_rows_norm(const RowsNorm& norm);
  void launch_rows_forward(const RowsForward& forward);
  bool takes_rows_route(const RouteParams& route, int64_t n);
  bool takes_rows_shared(const RowsProduct& next);
  std::optional<RowsForward> take_rows_choice(const ChosenExpertArgs& args, int64_t n);
  bool takes_rows_swiglu(View gate, View up, int64_t count);
  bool takes_rows_residual(View x, View y, int64_t count);
  bool takes_rows_head_norm(const HeadParams& norm);
  bool takes_rows_rope(const RopeParams& rope);
  bool takes_rows_append(const std::string& kernel, const AppendParams& params);
  void launch_rows_appended(const RowsAppended& rows);
  bool takes_norm_of_convolved(const HeadParams& norm);
  bool takes_gates_of_convolved(const DeltaGatesParams& gates);
  void launch_convolved(const Convolved& convolved);
  bool takes_step_delta(const std::string& kernel, Extent grid, const DeltaParams& params);
  bool takes_step_heads(const HeadParams& heads);
  void launch_step(const DeltaStep& step, const DigitRoom& to);
  void launch_step_apart(const DeltaStep& step);

  bool takes_head_norm(const HeadParams& params);
  bool takes_rope(const RopeParams& params);
  bool takes_row(const std::string& kernel, const AppendParams& params);
  void launch_heads(const HeadsRow& heads);
  bool takes_append(const std::string& kernel, const AppendParams& params);
  bool takes_attention(const AttentionOutput& next);
  bool takes_convolution(const ConvParams& params);
  bool takes_delta(const std::string& kernel, const DeltaParams& params);
  bool are_spans(const AttentionOutput& output, int64_t sessions, uint32_t part_count) const;
  // With the digits of what comes of it, if there is room for them.
  void launch_attention(const AttentionOutput& output, const DigitRoom& to = {});
  void launch_digits(const DigitsParams& params, int64_t fragments, uint32_t count);
  bool takes_copy(const WordsPlaces& places, int64_t bytes);
  void launch_copies(const Copies& copies);
  void launch_surveys(const Surveys& surveys);
  void append_rows(const std::string& kernel, const AppendParams& params);

  const CachedRows* cached_rows(std::span<const View> blocks, int64_t first, int64_t n);
  template <typename T>
  T* const* list_of(const std::vector<T*>& sessions);
  void run_attention(const gpu::AttentionTask& task, int64_t n);
  uint32_t tiles_together(int64_t tiles) const;
  void multiply_row(std::span<const Product> products);
  void multiply(std::span<const Product> products, int64_t n, bool together);
  // Blocks that go through tiles of experts.
  struct TilesRoom {
    uint32_t blocks = 0;
    uint32_t entries = 0;  // whose digits have room
    uint32_t bytes = 0;
  };
  std::optional<TilesRoom> tiles_room(const Matrix& matrix) const;
  bool go_by_tiles(const ChosenExpertArgs& args, int64_t pairs, bool are_aligned) const;
  void launch_tiles(const char* name, const Lists& lists, const Matrix& matrix, bool is_double,
                    const ExpertParams& params);
  bool takes_rows_down(Lists& lists, const ChosenExpertArgs& args, const RowsProduct& shared) const;
  Lists lists_of(const ExpertArgs& args);
  Lists group(const ChosenExpertArgs& args, int64_t pairs, const RouteParams* route = nullptr);
  ExpertParams expert_params(const Lists& lists, int64_t base, const Matrix& matrix, const Second& second, View bias,
                             int64_t k, View x, View out) const;
  void product_of_experts(const char* kernel, const Lists& lists, int64_t base, const Matrix& matrix,
                          const Second& second, View bias, int64_t k, View x, View out);
  void multiply_pairs(const std::string& kernel, const Lists& lists, const Matrix& matrix, bool aligned, uint32_t tiles,
                      ExpertParams params);
  void feed_forward(const Lists& lists, const ExpertMatrices& expert, int64_t base, const ExpertArgs& args);

  Launches& launches_;
  std::variant<std::monostate, NormParams, RowProduct, FeedForward, ExpertOutputs, DeltaGatesParams, AttentionOutput,
               HeadsRow, Appended, Convolved, DeltaInputs, DeltaRow, DeltaStep, RowsSum, RowsNorm, RowsHeads, RowsAdded,
               RowsGated, RowsProduct, RowsForward, RowsAppended, Copies, Surveys>
      waiting_;
  std::optional<MadeDigits> made_;
  // Of this batch:
  std::vector<RowTable> row_tables_;
  std::vector<SessionTable> session_tables_;
};

}  // namespace moeflux::cuda
